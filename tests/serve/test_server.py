"""Host. `jaxspec serve` and `jaxspec` as commands: what cannot start says so before anything slow begins."""

import socket

import pytest

from jaxspec import cli
from jaxspec.serve.server import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "'model'"),
        (["m", "--prt", "1"], "--port"),
        (["m", "--port", "70000"], "port"),
        (["m", "--host", "256.1.1.1"], "256.1.1.1"),
        (["m", "--speculative-method", "eagle3", "--num-speculative-tokens", "2"], "'eagle3' is not supported yet"),
        (["--config", "no/such.yaml"], "no/such.yaml"),
    ],
)
def test_a_wrong_config_ends_with_status_2(capsys, words, says):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxspec serve: ")
    assert says in said


def test_a_taken_port_is_said_before_anything_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["no-such-model", "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err


def test_the_command_lists_its_subcommands(capsys):
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in cli.COMMANDS)
    assert cli.main(["dance"]) == 2
    assert "no command 'dance'" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_subcommand_is_there(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out
