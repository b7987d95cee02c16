"""Layers that PyTorch does not have for CPUs."""

from .fused_conv_bn import FusedConvBN2d
from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = ["FusedConvBN2d", "SyncBatchNorm", "convert_sync_batchnorm"]
