"""Lets torchvision be imported beside a PyTorch that its compiled part was not built for, as the CPU build is.

Python runs this at the start of every process that has this folder on its path. torchvision gives abstract
implementations to two operators of its compiled part, which fails where they were never declared.
"""

import torch

torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
