"""DeepSeek-V4 kernels for SGLang on sm_120. Importing this package imports neither torch nor triton."""

from .version import __version__

__all__ = ["__version__"]
