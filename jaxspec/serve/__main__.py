"""Host. `python -m jaxspec.serve` is `jaxspec serve`."""

from jaxspec.serve.server import main

raise SystemExit(main())
