"""The copies between device and host pool that sglang does with GPU kernels, on a CPU.

`install` puts them into sglang's pool modules, under the names and with the arguments of
`sgl_kernel.kvcacheio`. They move rows and nothing else; every other line that runs is sglang's.

A row is what one layer holds of one token: `item_size` bytes. In the names: `lf` layer first, `pf`
page first, `ph` page head ([page, head, token, layer, dim]); `direct` takes tensors and whole
pages, the others addresses or tensors, and a stride of `layout_dim` bytes between tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["install"]

Address = int | Tensor
Tensors = Sequence[Tensor]


def _bytes(address: Address, length: int) -> np.ndarray:
    start = address.data_ptr() if isinstance(address, Tensor) and address.dim() else int(address)
    return np.frombuffer((ctypes.c_uint8 * length).from_address(start), dtype=np.uint8)


class _Rows:
    """Pieces of `width` bytes, one for each index: at ``base + index * stride + offset``."""

    def __init__(
        self, base: Address, indices: Tensor, stride: int, width: int, offset: int = 0
    ) -> None:
        starts = indices.to("cpu", torch.int64).numpy() * stride + offset
        self.memory = _bytes(base, int(starts.max()) + width if len(starts) else 0)
        self.at = starts[:, None] + np.arange(width)

    def move_to(self, target: _Rows) -> None:
        target.memory[target.at] = self.memory[self.at]


def _pages(indices: Tensor, page_size: int) -> Iterator[tuple[int, Tensor]]:
    """The first index of each page, divided by the page size, is the page: with its positions."""
    for start in range(0, len(indices), page_size):
        yield int(indices[start]) // page_size, torch.arange(start, start + page_size)


# -- whole pages between tensors (io backend `direct`) -----------------------------------------


def transfer_kv_direct(
    src_layers: Tensors,
    dst_layers: Tensors,
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices].to(dst.dtype)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)  # of K, then of V
    for part, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            src = src_ptrs[part * layers + layer]
            for page, at in _pages(dst_indices, page_size):
                dst[page, layer] = src[src_indices[at]].reshape(dst[page, layer].shape)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        for page, at in _pages(src_indices, page_size):
            rows = dst_indices[at]
            dst[rows] = src[page, layer_id].reshape(dst[rows].shape)


# -- rows between layers and a layer-first host pool (io backend `kernel`, as all below) -------


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    **_: Any,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices].reshape(dst[dst_indices].shape)


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    for layer in range(num_layers):
        _Rows(src_layers[layer], src_indices, item_size, item_size).move_to(
            _Rows(dst_layers[layer], dst_indices, item_size, item_size)
        )


# -- rows between layers and a page-first host pool --------------------------------------------


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    for layer in range(num_layers):
        _Rows(src_layers[layer], src_indices, item_size, item_size).move_to(
            _Rows(dst, dst_indices, dst_layout_dim, item_size, layer * item_size)
        )


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    _Rows(src, src_indices, src_layout_dim, item_size, layer_id * item_size).move_to(
        _Rows(dst, dst_indices, item_size, item_size)
    )


# -- heads between layers and a page-head host pool --------------------------------------------


def _by_head(indices: Tensor, head: int, heads: int, page_size: int) -> Tensor:
    """Counts [page, head, token] in a page-head pool: layers of one of them lie together."""
    indices = indices.to(torch.int64)
    return (indices // page_size * heads + head) * page_size + indices % page_size


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    piece = item_size // head_num
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for head in range(head_num):
            rows = _by_head(dst_indices, head, head_num, page_size)
            for layer in range(num_layers):
                _Rows(src[layer], src_indices, item_size, piece, head * piece).move_to(
                    _Rows(dst, rows, num_layers * piece, piece, layer * piece)
                )


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    piece, layers = item_size // head_num, src_layout_dim // item_size
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        for head in range(head_num):
            rows = _by_head(src_indices, head, head_num, page_size)
            _Rows(src, rows, layers * piece, piece, layer_id * piece).move_to(
                _Rows(dst, dst_indices, item_size, piece, head * piece)
            )


def install() -> None:
    """Puts the copies into sglang, and takes page-locking out of it. Again is a no-op."""
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    for module in (mha, mla):
        for name, function in globals().items():
            if name.startswith("transfer_kv_"):
                setattr(module, name, function)
    for module in (base, common, mha, mla):
        module._cuda_host_unregister = lambda *args, **kw: None
    common._cuda_host_register = lambda *args, **kw: None
    made = base.HostKVCache.__init__
    if getattr(made, "pageable", False):
        return

    def init(self: Any, *args: Any, **kw: Any) -> None:
        made(self, *args, **{**kw, "pin_memory": False})

    init.pageable = True  # type: ignore[attr-defined]
    base.HostKVCache.__init__ = init
