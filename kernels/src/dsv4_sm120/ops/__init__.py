"""One folder per op. Each provides:

``naive.py``
    The truth in plain torch, fp32 or better, written for reading.
``kernel.py``
    Triton kernels and their launcher. No host synchronisation, no autotuning, no shapes that depend on lengths.
``__init__.py``
    The callable(s) with the stock SGLang signature; ``self_check(device)``, which raises ``AssertionError`` when the
    kernel disagrees with ``naive`` on ``device``; ``aot_cases(arch)``, every shipped config as an ``aot.AotCase``.
    Importing it imports torch but creates no CUDA context; triton is imported on first call.

Tuned launch parameters are package data: ``configs/<op>.<arch>.json`` (see ``dsv4_sm120.config``).
"""
