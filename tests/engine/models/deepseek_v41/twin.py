"""The whole model once more from the spec alone: full recompute, no caches, row by row, float64. To compare with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.kernels.reference.engram import engram_constants
from headrace.kernels.reference.quant import widen_fp4_weight, widen_fp8_weight
from headrace.kernels.reference.rope import Yarn, rope_frequencies

INFINITY = float("inf")
Tensor = torch.Tensor


class Twin:
    """Logits of every row of one sequence under bounded replay's visibility (spec §18.3 ``mask``)."""

    def __init__(self, folder: Path) -> None:
        self.stored = load_file(folder / "model.safetensors")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
        self.map = load_file(folder / "engram_token_map.safetensors")["engram_token_map"].tolist()
        c = self.config
        self.ratios: list[int] = c["compress_ratios"][: c["num_hidden_layers"]]
        consumers = [layer for layer, ratio in enumerate(self.ratios) if ratio == 1]
        self.first_consumer = consumers[0] if consumers else len(self.ratios)
        self.eps = c["rms_norm_eps"]

    def weight(self, name: str) -> Tensor:
        value = self.stored.get(f"{name}.weight", self.stored.get(name))
        assert value is not None, name
        scale = self.stored.get(f"{name}.scale")
        if scale is None:
            return value.double()
        if value.dtype == torch.int8:
            return widen_fp4_weight(value, scale).double()
        if scale.shape[0] == value.shape[0]:
            factor = torch.exp2(scale.view(torch.uint8).double() - 127).repeat_interleave(32, 1)
            return value.double() * factor
        return widen_fp8_weight(value, scale).double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.weight(name) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def rotate(self, x: Tensor, position: int, layer: int, sign: int = 1) -> Tensor:
        """Adjacent pairs of the last rd channels; every r > 0 layer uses the compressed table for everything."""
        c, rd = self.config, self.config["qk_rope_head_dim"]
        scaling = c["rope_scaling"]
        if self.ratios[layer]:
            yarn = Yarn(scaling["factor"], scaling["original_max_position_embeddings"], 32, 1)
            frequencies = rope_frequencies(rd, c["compress_rope_theta"], yarn)
        else:
            frequencies = rope_frequencies(rd, c["rope_theta"])
        angle = (torch.tensor(float(position)) * frequencies).double()
        turn = torch.complex(angle.cos(), sign * angle.sin())
        pairs = torch.view_as_complex(x[..., -rd:].reshape(*x.shape[:-1], rd // 2, 2).contiguous())
        return torch.cat((x[..., :-rd], torch.view_as_real(pairs * turn).flatten(-2)), dim=-1)

    def source(self, sources: Sequence[int], layer: int) -> int:
        return max(s for s in sources if s <= layer)

    # --- the parts ---------------------------------------------------------------------------------------------

    def mixes(self, streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        hc, eps = self.config["hc_mult"], self.config["hc_eps"]
        v = streams.flatten()
        m = (self.weight(f"{prefix}_fn") @ v) * torch.rsqrt(v.square().mean() + self.eps)
        scale, base = self.weight(f"{prefix}_scale"), self.weight(f"{prefix}_base")
        pre = torch.sigmoid(m[:hc] * scale[0] + base[:hc]) + eps
        post = 2 * torch.sigmoid(m[hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        combine = torch.softmax((m[2 * hc :] * scale[2] + base[2 * hc :]).view(hc, hc), -1) + eps
        combine = combine / (combine.sum(0) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            combine = combine / (combine.sum(1, keepdim=True) + eps)
            combine = combine / (combine.sum(0) + eps)
        return pre, post, combine

    def engram(self, layer: int, streams: list[Tensor], ids: Sequence[int], image: Sequence[bool]) -> list[Tensor]:
        c = self.config
        n, heads, hc, d = c["engram_max_ngram_size"], c["engram_n_heads"], c["hc_mult"], c["hidden_size"]
        ordinal = c["engram_layer_ids"].index(layer)
        constants = engram_constants(
            tuple(c["engram_layer_ids"]), n, heads, c["engram_vocab_size"], c["engram_compressed_vocab_size"]
        )
        primes, offsets = constants.primes[ordinal].tolist(), constants.offsets[ordinal].tolist()
        multipliers = constants.multipliers[ordinal].tolist()
        pad, table = self.map[c["engram_pad_token_id"]], self.weight(f"layers.{layer}.engram.embed")
        out = []
        for p, stream in enumerate(streams):
            if image[p]:
                out.append(stream)
                continue
            back = [self.map[ids[p - k]] if p >= k and not any(image[p - k : p + 1]) else pad for k in range(n)]
            mixed, rows = back[0] * multipliers[0], []
            for size in range(2, n + 1):
                mixed ^= back[size - 1] * multipliers[size - 1]
                rows += [mixed % primes[size - 2][h] + offsets[(size - 2) * heads + h] for h in range(heads)]
            memory = self.weight(f"layers.{layer}.engram.wkv") @ table[rows].flatten()
            keys, value = memory[: hc * d].view(hc, d), memory[hc * d :]
            product = self.weight(f"layers.{layer}.engram.q_weight") * self.weight(f"layers.{layer}.engram.k_weight")
            dot = (stream * product * keys).sum(1) * d**-0.5
            dot = dot * torch.rsqrt(stream.square().mean(1) + self.eps) * torch.rsqrt(keys.square().mean(1) + self.eps)
            gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
            out.append(stream + gate[:, None] * value)
        return out

    def publish(self, layer: int, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Compressed entries and index keys of a kv source."""
        prefix, ratio = f"layers.{layer}.attn", self.ratios[layer]
        entries, keys = [], []
        for j in range(len(x) // ratio):
            group = torch.stack(x[j * ratio : (j + 1) * ratio])
            pooled = group @ self.weight(f"{prefix}.compressor.wkv").T
            if ratio > 1:
                gates = torch.softmax(group @ self.weight(f"{prefix}.compressor.wgate").T, 0)
                pooled = gates * pooled
            latent = self.norm(pooled.sum(0), f"{prefix}.compressor.norm")
            key = self.norm(self.weight(f"{prefix}.indexer.wk") @ latent, f"{prefix}.indexer.k_norm")
            keys.append(self.rotate(key, j * ratio, layer))
            entries.append(self.rotate(latent, j * ratio, layer))
        return entries, keys

    def select(
        self, layer: int, p: int, x: Tensor, qr: Tensor, keys: list[Tensor], allowed: set[int] | None
    ) -> tuple[list[int], set[int]]:
        """Chosen entries, and the entries of the candidate blocks."""
        c, prefix = self.config, f"layers.{layer}.attn.indexer"
        heads, block = c["index_n_heads"], c["candidate_block_size"]
        q = self.rotate((self.weight(f"{prefix}.wq_b") @ qr).view(heads, -1), p, layer)
        w = self.weight(f"{prefix}.weights_proj") @ x * c["index_head_dim"] ** -0.5 * heads**-0.5
        visible = (p + 1) // self.ratios[layer]
        scores = [float(((q @ key).relu() * w).sum()) for key in keys[:visible]]
        ranks = [max(scores[i : i + block]) for i in range(0, visible, block)]
        if ranks:
            ranks[-1] = INFINITY
        best = sorted(range(len(ranks)), key=lambda b: (-ranks[b], b))[: c["candidate_topk_blocks"]]
        candidates = {j for b in best for j in range(b * block, (b + 1) * block)}
        able = [j for j in range(visible) if allowed is None or j in allowed]
        return sorted(able, key=lambda j: (-scores[j], j))[: c["index_topk"]], candidates

    def moe(self, layer: int, x: Tensor, image: bool) -> Tensor:
        c, prefix = self.config, f"layers.{layer}.ffn"

        def expert(name: str, share: float) -> Tensor:
            gate, up = self.weight(f"{name}.w1") @ x, self.weight(f"{name}.w3") @ x
            if limit := c["swiglu_limit"]:
                gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
            return self.weight(f"{name}.w2") @ (torch.nn.functional.silu(gate) * up * share)

        scores = torch.nn.functional.softplus(self.weight(f"{prefix}.gate") @ x).sqrt()
        biased = scores + self.weight(f"{prefix}.gate.bias_vl" if image else f"{prefix}.gate.bias")
        chosen = biased.sort(descending=True, stable=True).indices[: c["num_experts_per_tok"]].tolist()
        total = float(scores[chosen].sum()) if len(chosen) > 1 else 1.0
        parts = [expert(f"{prefix}.experts.{e}", float(scores[e]) / total * c["routed_scaling_factor"]) for e in chosen]
        return torch.stack([*parts, expert(f"{prefix}.shared_experts", 1.0)]).sum(0)

    # --- the whole ---------------------------------------------------------------------------------------------

    def logits(
        self, ids: Sequence[int], keep_from: int = 0, image: Sequence[bool] = (), embeddings: Tensor | None = None
    ) -> Tensor:
        c = self.config
        image = [*image, *[False] * (len(ids) - len(image))]
        given = iter(() if embeddings is None else embeddings.double())
        embed = self.weight("embed")
        streams = [(next(given) if image[p] else embed[token]).expand(c["hc_mult"], -1) for p, token in enumerate(ids)]
        pres = [torch.eye(c["hc_mult"], dtype=torch.double)[0] for _ in ids]
        pools: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        chosen: list[list[int]] = []
        candidates: list[set[int]] = []
        for layer, ratio in enumerate(self.ratios):
            if layer in c["engram_layer_ids"]:
                streams = self.engram(layer, streams, ids, image)
            prefix = f"layers.{layer}.attn"
            collapsed = [pre @ stream for pre, stream in zip(pres, streams, strict=True)]
            xs = [self.norm(x, f"layers.{layer}.attn_norm") for x in collapsed]
            keys = [
                self.rotate(self.norm(self.weight(f"{prefix}.wkv") @ x, f"{prefix}.kv_norm"), p, layer)
                for p, x in enumerate(xs)
            ]
            if layer in c["kv_source_layer_ids"]:
                pools[layer] = self.publish(layer, xs)
            pool = pools[self.source(c["kv_source_layer_ids"], layer)] if ratio else ([], [])
            qrs = [self.norm(self.weight(f"{prefix}.wq_a") @ x, f"{prefix}.q_norm") for x in xs]
            if layer in c["index_source_layer_ids"]:
                origin = c["candidate_source_layer_id"]
                searches = origin is not None and layer > origin
                found = [
                    self.select(layer, p, x, qr, pool[1], candidates[p] if searches else None)
                    for p, (x, qr) in enumerate(zip(xs, qrs, strict=True))
                ]
                chosen = [one for one, _ in found]
                if layer == origin:
                    candidates = [blocks for _, blocks in found]
            lowest = keep_from if layer >= self.first_consumer else 0
            for p in range(len(ids)):
                seen = keys[max(p - c["sliding_window"] + 1, lowest, 0) : p + 1]
                if ratio:
                    seen = seen + [pool[0][j] for j in chosen[p]]
                y = self.attend(layer, p, qrs[p], seen)
                pre, post, combine = self.mixes(streams[p], f"layers.{layer}.hc_attn")
                streams[p] = post[:, None] * y + combine.T @ streams[p]
                next_pre, post, combine = self.mixes(streams[p], f"layers.{layer}.hc_ffn")
                z = self.moe(layer, self.norm(pre @ streams[p], f"layers.{layer}.ffn_norm"), image[p])
                streams[p], pres[p] = post[:, None] * z + combine.T @ streams[p], next_pre
        hidden = [self.norm(pre @ stream, "norm") for pre, stream in zip(pres, streams, strict=True)]
        return torch.stack(hidden) @ self.weight("head").T

    def attend(self, layer: int, p: int, qr: Tensor, seen: list[Tensor]) -> Tensor:
        c, prefix = self.config, f"layers.{layer}.attn"
        heads, groups = c["num_attention_heads"], c["o_groups"]
        q = self.rotate((self.weight(f"{prefix}.wq_b") @ qr).view(heads, -1), p, layer)
        out = torch.zeros_like(q)
        if seen:
            kv = torch.stack(seen)
            scores = torch.exp(q @ kv.T * c["head_dim"] ** -0.5)
            sink = torch.exp(self.weight(f"{prefix}.attn_sink"))
            out = scores @ kv / (scores.sum(1) + sink)[:, None]
        out = self.rotate(out, p, layer, -1).reshape(groups, -1)
        wo_a = self.weight(f"{prefix}.wo_a").view(groups, -1, out.shape[1])
        return self.weight(f"{prefix}.wo_b") @ torch.einsum("gri,gi->gr", wo_a, out).flatten()
