"""Weights and activations that wait on the CPU until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..errors import BucketingError
from .blocks import blocks_of


def check_blocks(count: int, *, blocks: int) -> None:
    """Raise BucketingError if more blocks are to wait than a model has."""
    if count > blocks:
        raise BucketingError(
            f"`offload_blocks={count}` is more than the {blocks} blocks of this model; lower it to {blocks} or less."
        )


def offloaded_blocks(transformer: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """Return the blocks that wait on the CPU: `count` of them, spread evenly.

    Of eight blocks, three are the first, the third and the sixth.
    """
    blocks = blocks_of(transformer)
    return [blocks[index * len(blocks) // count] for index in range(count)]


def offload_blocks(transformer: torch.nn.Module, count: int, *, device: torch.device) -> None:
    """Make the frozen weights of some blocks wait on the CPU, and come to a device while their block is computed.

    diffusers' group offloading moves a block's weights back after its forward pass, also those that the backward pass
    still needs. Here gradient checkpointing computes the block again, so that the weights come a second time; they
    stay until autograd has used them, although the block gives them back at once. Waiting weights are no parameters
    of their module, so that nothing else moves, counts, sends or saves them.

    Args:
        transformer (`torch.nn.Module`): Transformer on the CPU, with frozen weights, and adapters if there are any.
        count (`int`): Number of blocks, see [`offloaded_blocks`].
        device (`torch.device`): Device that computes.
    """
    for block in offloaded_blocks(transformer, count):
        weights = _Waiting(block, device)
        # Before other hooks; also after an exception, by which gradient checkpointing ends early.
        block.register_forward_pre_hook(weights.bring, prepend=True)
        block.register_forward_hook(weights.release, always_call=True)


def offload_idle(transformers: Sequence[torch.nn.Module], *, device: torch.device) -> None:
    """Make the frozen weights of all transformers wait on the CPU but those of the one that was called last.

    Its forward brings its weights to the device, after those of the others have left it; so the pipeline's own call
    exchanges them too. Adapters stay where they are.

    Args:
        transformers (sequence of `torch.nn.Module`): Transformers on the CPU, with frozen weights and adapters.
        device (`torch.device`): Device that computes.
    """
    experts = [_WaitingExpert(transformer, device) for transformer in transformers]
    for transformer, expert in zip(transformers, experts, strict=True):
        expert.others = [other for other in experts if other is not expert]
        transformer.register_forward_pre_hook(expert.exchange, prepend=True)


class _Waiting:
    """The frozen weights of a module on the CPU, in page-locked memory where the device is a GPU."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.device = device
        self.weights: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]] = []
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    weight = parameter.detach().cpu()
                    weight = weight.pin_memory() if device.type == "cuda" else weight
                    del module._parameters[name]
                    self.weights.append((module, name, weight, weight.to("meta")))
        self.release()

    def bring(self, *_: Any) -> None:
        """Copy the weights to the device."""
        for module, name, weight, _shape in self.weights:
            here = weight.clone() if self.device.type == "cpu" else weight.to(self.device, non_blocking=True)
            setattr(module, name, here)

    def release(self, *_: Any) -> None:
        """Leave only shapes and dtypes in the modules."""
        for module, name, _weight, shape in self.weights:
            setattr(module, name, shape)


class _WaitingExpert(_Waiting):
    """The frozen weights of a transformer, which are parameters while they are on the device: models look for them."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.others: list[_WaitingExpert] = []
        self.here = False
        super().__init__(model, device)

    def exchange(self, *_: Any) -> None:
        """Release the weights of the others, and bring these, unless they are on the device already."""
        if not self.here:
            for other in self.others:
                other.release()
            self.bring()

    def bring(self, *_: Any) -> None:
        """Copy the weights to the device, as parameters."""
        super().bring()
        for module, name, _weight, _shape in self.weights:
            setattr(module, name, torch.nn.Parameter(getattr(module, name), requires_grad=False))
        self.here = True

    def release(self, *_: Any) -> None:
        """Leave only shapes and dtypes in the modules."""
        for module, name, _weight, _shape in self.weights:
            module._parameters.pop(name, None)
        super().release()
        self.here = False


def activations_on_cpu() -> AbstractContextManager[Any]:
    """Return a context for a forward pass whose activations wait on the CPU for the backward pass.

    It is like torch's `save_on_cpu`, but for what depends on trained weights alone: that one would also copy weights,
    in each layer that saves them, and in each block the text and positions that all blocks share. With gradient
    checkpointing, these activations are the inputs of the blocks.
    """
    return torch.autograd.graph.saved_tensors_hooks(_to_cpu, _from_cpu)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
    if not tensor.requires_grad or tensor.is_leaf:
        return tensor
    on_gpu = tensor.device.type == "cuda"  # which copies to page-locked memory and back in the order of its stream
    # In the same memory layout, as kernels sum in the order of the memory: another layout would round differently.
    waiting = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=on_gpu)
    return tensor.device, waiting.copy_(tensor.detach(), non_blocking=on_gpu)


def _from_cpu(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, waiting = packed
    return waiting.to(device, non_blocking=True)
