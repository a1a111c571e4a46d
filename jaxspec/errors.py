"""Host. The errors users see: each message states the rule, the value that broke it, and the remedy."""


class JaxspecError(Exception):
    """Base of every error jaxspec raises on purpose."""


class ConfigError(JaxspecError):
    """A configuration key, value or combination that cannot work."""


class WeightsError(JaxspecError):
    """A checkpoint that is missing, corrupt, or does not fit the model it should fill."""


class CapacityError(JaxspecError):
    """A request or plan that needs more rows, pages or memory than there are."""


class QueueFullError(CapacityError):
    """Too many requests wait; the same request may be taken later."""


class EngineDeadError(JaxspecError):
    """The engine's thread has ended, or has not begun; nothing is answered."""


class RequestError(JaxspecError):
    """A request that is refused; `param` names the field at fault, as OpenAI's errors do."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class HostError(JaxspecError):
    """Another process of the job has failed or gone: this one ends too."""
