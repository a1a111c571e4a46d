"""Host. What a user may set of the engine: keys flat as vLLM's are. The server's stand in `config/server.py`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from jaxspec.config.base import StrictConfig
from jaxspec.config.shipped import with_shipped
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.errors import ConfigError

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


class EngineConfig(StrictConfig):
    """Everything the engine is built from. None and "auto" are settled once, by `resolve`."""

    TITLE: ClassVar[str] = "engine config"
    NOT_YET: ClassVar[dict[str, Any]] = {
        "pipeline_parallel_size": 1,
        "enable_eplb": False,
        "enable_lora": False,
        "load_format": "auto",
        "revision": None,
        "tokenizer_mode": "auto",
        "trust_remote_code": False,
        "hf_overrides": None,
        "generation_config": "vllm",  # the model's own sampling defaults are not applied
        "enforce_eager": False,
        "disable_log_stats": False,
        "swap_space": 0,
        "cpu_offload_gb": 0,
    }

    @classmethod
    def normalize(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "memory_fraction" in data:
            if data.get("gpu_memory_utilization") is not None:
                raise ConfigError("memory_fraction is another name of gpu_memory_utilization; give one of the two")
            data["gpu_memory_utilization"] = data.pop("memory_fraction")
        if isinstance(data.get("speculative_config"), Mapping):
            data["speculative_config"] = with_shipped(data["speculative_config"], data.get("model"))
        return data

    model: str = Field(description="the target: an alias (smollm2-135m-instruct), hub name, folder or .gguf file")
    tokenizer: str | None = Field(None, description="folder or .gguf file of the tokenizer; the model's own")
    served_model_name: str | None = Field(None, description="name the server answers to; the model as given")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="weights; auto: float32 for a float32 checkpoint, else bfloat16"
    )
    quantization: Literal["int8"] | None = Field(
        None, description="int8: linear maps of the target's layers as integers, a scale an output channel"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt and answer together, in tokens; the model's limit, if it fits in memory"
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto", description="pages, drafters' too; auto: as dtype; int8: a scale a slot and head"
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="rows that a group (data_parallel_size) decodes together; 8 on CPU, 64 elsewhere"
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens that a group prefills in a step, all together; 256 on CPU, 2048 elsewhere",
    )
    enable_prefix_caching: bool = Field(
        True, description="keep pages of prompts and answers for requests that begin with the same tokens"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="who runs first: the first to come, or the lowest priority of a request, and then so"
    )
    max_queued_requests: int | None = Field(
        None,
        ge=0,
        description="answers that may wait for a group while it has no free row; more get HTTP 429; any number",
    )
    block_size: int | None = Field(
        None, ge=1, le=1024, description="slots in a page of the cache, in tokens; 64 on CPU, 16 elsewhere"
    )
    num_pages: int | None = Field(
        None, ge=1, description="pages in a group's cache; what max_num_seqs rows need at most, if it fits in memory"
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0.0, le=1.0, description="share of the device's memory to plan with; 0.9, or 0.4 of the host's on CPU"
    )  # its other name is memory_fraction
    seed: int = Field(0, ge=0, lt=2**32, description="root of the seeds of requests that bring none")
    tensor_parallel_size: int = Field(
        1, ge=1, description="devices that the model's heads, widths and vocabulary are split over"
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        description="groups of tensor_parallel_size devices, each with the whole model and its own rows and pages",
    )
    enable_expert_parallel: bool = Field(
        False, description="those devices hold whole experts, some each, in place of a part of every one"
    )
    nnodes: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1, description="processes of the job, each with its devices; auto: as many as the cluster says"
    )
    node_rank: int | None = Field(
        None, ge=0, description="number of this process, from 0, which takes the requests; what the cluster says"
    )
    master_addr: str | None = Field(
        None, description="address at which process 0 is reached by the others; what the cluster says"
    )
    master_port: int = Field(29501, ge=1, le=65535, description="port there; goes with master_addr")
    watchdog_timeout_s: float | None = Field(
        300.0,
        gt=0,
        description="seconds that a step may take on several hosts, before all end, naming host and step; null: any",
    )
    speculative_config: SpeculativeConfig | None = Field(
        None, description="how tokens are guessed, as JSON; null decodes plainly"
    )
    rounds_per_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="decode rounds on the device before the host looks; 1 on CPU, 8 elsewhere"
    )
    async_scheduling: bool | None = Field(
        None, description="run the next rounds while the host reads the last; off on CPU, which is the host"
    )
    exact: bool = Field(
        False,
        description="one row shape for all rounds, at the highest matmul precision: with drafts and without, a token "
        "has the same logits; rounds without drafts get slower",
    )
    max_logprobs: int = Field(
        20, ge=-1, description="most logprobs and prompt_logprobs a request may ask for; -1: the whole vocabulary"
    )
    logprobs_mode: LogprobsMode = Field(
        "raw_logprobs", description="what logprobs are of: the model's own logits, or what tokens are drawn from"
    )
    enable_structured_outputs: bool = Field(
        True, description="compile what grammars and a request's own logits processors need; false refuses those"
    )
    record: str | None = Field(
        None, description="file for all that happens to the engine, begun anew; `jaxspec replay` makes it happen again"
    )
    compilation_cache_dir: str | None = Field(
        "auto", description="folder of compiled programs, null for none; auto: jaxspec's folder in the user's cache"
    )
    implementation: Literal["auto", "reference", "pallas"] = Field(
        "auto", description="form of the kernels; auto: pallas on TPU and CUDA GPUs, reference elsewhere"
    )
