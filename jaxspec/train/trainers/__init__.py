"""Host. A trainer a method: method -> (its config, the target) -> `Trainer`."""
