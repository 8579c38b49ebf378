"""Golden vectors: load a folder of cases, run the project's code on each, compare by the case's own tolerances.

A folder holds ``manifest.json`` and one safetensors file per family (../shared/golden/v41/README.md describes both).
Case names are ``family/case``. To serve a family, put a module into ``families/`` (all of them are imported)::

    from bench.golden_harness.case import Case, Tensors
    from bench.golden_harness.registry import runner

    @runner("compressor")
    def run(case: Case) -> Tensors:
        x, wkv = case.input("x"), case.weight("wkv")     # widened where the manifest says cast_to
        ratio = case.number("ratio")                     # from case.config, typed
        return {"latent": …}                             # one tensor per output name

- Return every gating output; one that is missing fails the case. Shapes are those of the manifest; a dtype may differ
  (values are compared in float64, raw bytes for byte forms). −inf may be returned where −1e30 is stored.
- ``neg.NAME`` (must_differ) is compared with what you return as ``neg.NAME`` or, failing that, ``NAME``.
- ``must``, ``may``, ``count`` (and ``*_cand``) beside a top-k output are its bounds; returning them is optional.
- ``case.expected(NAME)`` gives a stored output, for cases that say to feed a golden intermediate into the next part.
- ``case.checkpoint`` is the folder of the tiny checkpoint of composed cases; cache what you load from it by that path.
- Draw shapes, sizes and constants from ``case.config`` and the tensors, never from the TINY config: other folders hold
  other sizes. Dispatch inside a family on what a case contains or how its name begins.
"""
