"""Let `import torchvision` succeed beside PyTorch's CPU build.

The torchvision of the package index is compiled for CUDA; its operators do not load beside a CPU torch, and its import
then stops at "operator torchvision::nms does not exist". SGLang only needs the image transforms, which are pure Python.
Declaring the missing operator names just before torchvision is imported is enough. A torchvision that matches its torch
is left alone.
"""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.abc import MetaPathFinder

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators(MetaPathFinder):
    """Finds nothing itself: it acts when torchvision is looked for, and steps aside."""

    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            self.declare()

    def declare(self) -> None:
        """Declare the operators, unless torch and torchvision are a matching pair."""
        import torch

        if torch.version.cuda or importlib.metadata.version("torchvision").endswith("+cpu"):
            return
        # Kept on the class: the declarations live as long as this object does.
        DeclareOperators.library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in OPERATORS:
            DeclareOperators.library.define(operator + SCHEMA)


sys.meta_path.insert(0, DeclareOperators())
