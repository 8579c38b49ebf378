"""Settings of one engine: a plain dataclass, so that the engine runs where only torch is installed.

The services' settings objects nest it; they refuse unknown keys and render its documentation from the metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace.engine.described import described, require

Replay = Literal["compact", "mask", "off"]


@dataclass(frozen=True)
class EngineSettings:
    """How one worker's engine uses its machine. Raises ValueError for a value out of range."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    threads: int = described(1, "torch intra-op threads of the engine thread; 0 leaves torch's choice.")
    kv_bytes: int = described(
        1 << 30,
        "Bytes for block rows, slots and snapshots together. The launcher divides the cgroup's memory over its "
        "children and passes the share here (L29).",
    )
    snapshot_fraction: float = described(0.25, "Share of kv_bytes for snapshots, where the layout has any.")
    max_sequences: int = described(32, "Choices that may hold a slot at once; also the largest decode batch.")
    max_batched_tokens: int = described(
        512, "Token budget of a step. Decode rows come first; prefill chunks fill the rest."
    )
    max_waiting: int = described(256, "Requests that may wait for admission; more are refused (L12).")
    max_choices: int = described(16, "Largest n of a request.")
    default_max_tokens: int = described(1024, "max_tokens where a request gives none, capped further by the context.")
    spill_bytes: int = described(
        256 << 20, "Host bytes for rows and slots of preempted sequences; beyond it they are recomputed."
    )
    replay: Replay = described(
        "compact",
        "Bounded replay of layouts with snapshots: compact runs consumers on the kept rows only, mask runs all rows "
        "with the same visibility, off is the full model and disables prefix reuse.",
    )
    keep_tokens: int | None = described(
        None, "K of bounded replay; absent is window + 2 · backtracking, the least is window + backtracking."
    )
    prefix_reuse: bool = described(True, "Reuse computed prefixes inside the pool.")
    snapshot_interval: int = described(
        4096, "Prompt tokens between two snapshots besides those at its end; rounded up to blocks, 0 takes none."
    )
    load_fraction: float = described(
        0.75,
        "Share of the pool that prefixes loaded from the cache tier may hold before their requests run. They give way "
        "to what runs.",
    )
    write_fraction: float = described(0.125, "Share of the pool that may be pinned while the cache tier copies it.")
    decode_buckets: tuple[int, ...] = described(
        (),
        "Batch sizes to which decode steps are padded; empty: nothing, or powers of two where they are captured.",
    )
    capture_decode: bool = described(True, "CUDA: replay decode steps as captured graphs. Other devices ignore it.")
    lease_s: float = described(5.0, "Time to live of a reservation between two renewals (L8).")
    pause_spill_s: float = described(
        5.0,
        "How long a request that is paused, as its client reads slowly, keeps its rows and slot; then it is spilled.",
    )
    pause_end_s: float = described(30.0, "How long it may be paused at all; then it ends with RESOURCE_EXHAUSTED.")
    grammar_compile_s: float = described(
        10.0, "Longest compilation of a constraint's language; then its process is killed and the request refused."
    )
    grammar_memory_bytes: int = described(2 << 30, "Most memory of that process, beyond its libraries.")
    grammar_cache_bytes: int = described(64 << 20, "Bytes of compiled languages that are kept; the longest unused go.")
    mask_limit_s: float = described(
        1.0, "Longest work at one token's mask, in seconds of its thread; a request that takes more ends."
    )
    retry_after_s: float = described(0.5, "Delay told to clients that are refused for overload (L12).")

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "max_sequences", "max_batched_tokens", "max_waiting", "max_choices"):
            require(getattr(self, name) >= 1, name, "must be at least 1")
        require(self.default_max_tokens >= 1, "default_max_tokens", "must be at least 1")
        require(self.threads >= 0, "threads", "must not be negative")
        require(self.spill_bytes >= 0, "spill_bytes", "must not be negative")
        require(0.0 <= self.snapshot_fraction <= 0.9, "snapshot_fraction", "must lie in [0, 0.9]")
        require(self.snapshot_interval >= 0, "snapshot_interval", "must not be negative")
        require(0.0 < self.load_fraction <= 1.0, "load_fraction", "must lie in (0, 1]")
        require(0.0 < self.write_fraction <= 0.5, "write_fraction", "must lie in (0, 0.5]")
        require(self.replay in ("compact", "mask", "off"), "replay", "must be compact, mask or off")
        require(self.keep_tokens is None or self.keep_tokens >= 1, "keep_tokens", "must be at least 1")
        require(all(size >= 1 for size in self.decode_buckets), "decode_buckets", "must hold sizes of at least 1")
        require(self.lease_s > 0, "lease_s", "must be above 0")
        require(0 < self.pause_spill_s < self.pause_end_s, "pause_spill_s", "must be above 0 and below pause_end_s")
        require(self.grammar_compile_s > 0, "grammar_compile_s", "must be above 0")
        require(self.grammar_memory_bytes >= 1 << 26, "grammar_memory_bytes", "must be at least 64 MiB")
        require(self.grammar_cache_bytes >= 0, "grammar_cache_bytes", "must not be negative")
        require(self.mask_limit_s > 0, "mask_limit_s", "must be above 0")
        require(self.retry_after_s > 0, "retry_after_s", "must be above 0")
        # Decode rows of every choice must fit a step and leave prefill some of it.
        if self.max_batched_tokens <= self.max_sequences:
            raise ValueError(
                f"max_batched_tokens {self.max_batched_tokens} must exceed max_sequences {self.max_sequences}: decode "
                "rows come first and prefill needs the rest"
            )
