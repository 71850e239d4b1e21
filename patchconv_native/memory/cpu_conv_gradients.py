"""What oneDNN 3.12 takes on the CPU for the gradients of convolutions, as each of its kernels books it.

The input's gradient is computed as a transposed convolution, and that of a transposed one as a convolution.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from . import cpu_conv_bfloat16 as bfloat16
from .cpu_conv_calls import BARRIER, BLOCK, BOOKING, PAGE, Conv, blocked, pointers, up

HALF = BLOCK // 2
"""Channels in a block of the kernels for narrower vectors, which are tried next."""
MOST_SCRATCH = 2**30
"""Bytes that oneDNN books where it multiplies matrices, at most."""
ROWS = 9
"""Threads share an image by rows if each has as many."""
BY_REDUCER = 3 * PAGE
"""Bytes besides the sums where oneDNN's reducer adds these."""


def of_input(conv: Conv) -> int:
    """Bytes of a transposed convolution above its result."""
    (given, made), size = conv.channels, conv.dtype.itemsize
    read, result = math.prod(conv.input), math.prod(conv.output)
    if conv.strided and conv.dilated:
        return _products(conv.turned(), False) * size + BOOKING
    block, half = _block(conv), conv.dtype == torch.bfloat16
    if conv.strided and (conv.groups == 1 or given > HALF or half):
        weights = conv.groups * conv.taps * up(given, 4 // size) * up(made, BLOCK if made <= 2 * BLOCK else 4 * BLOCK)
        there = 0 if conv.last or conv.input[1] == 1 else read
        copies = 0 if conv.last or conv.output[1] == 1 else 2 * result
        cut = any(made % stride for made, stride in zip(conv.output[2:], conv.stride, strict=True))
        biased = _with_bias(conv, result) if cut else 0
        strided = max((there + weights) * size + _spread(conv) + biased, copies * size)
        if conv.groups == 1 or given > BLOCK or half or not block:
            return strided
        return max(strided, of_input(dataclasses.replace(conv, stride=[1] * len(conv.stride))))  # either may be chosen
    narrow = conv.depthwise and len(conv.input) == 4 and not conv.dilated
    far = any(pad >= reach for pad, reach in zip(conv.padding, conv.reach, strict=True))
    if not narrow and (far or not block):
        return _products(conv.turned(), False) * size + 3 * BOOKING
    if conv.last and (conv.groups == 1 or given > BLOCK):
        columns = up(made, BLOCK if conv.groups > 1 else min(up(made, BLOCK), 4 * BLOCK))
        return conv.groups * conv.taps * given * columns * size + PAGE + BOOKING + pointers(conv)
    if narrow:
        weights = up(conv.groups, BLOCK) * conv.taps
    else:
        weights = conv.groups * conv.taps * up(given, block) * up(made, block)
    if conv.last:
        return weights * size + _with_bias(conv, result)
    out = result
    if conv.groups == 1 or conv.depthwise:
        read, out = blocked(conv.input), blocked(conv.output)
    sums = torch.get_num_threads() * up(made, BLOCK) * math.prod(conv.output[2:]) * 4 * (half and conv.taps == 1)
    return max((read + weights + out - result) * size + sums + _with_bias(conv, out), out * size)


def _with_bias(conv: Conv, result: int) -> int:
    """A bias is added to another copy of the result."""
    return result * conv.dtype.itemsize + BOOKING if conv.bias else 0


def _block(conv: Conv) -> int:
    """Channels in a block where oneDNN's direct kernel takes a transposed convolution. 0 where it does not."""
    if conv.groups == 1 or all(one % BLOCK == 0 for one in conv.channels):
        return BLOCK
    for block in (HALF, HALF // 2):
        if all(one % block == 0 and (one < BLOCK or not conv.last) for one in conv.channels):
            return block
    return BLOCK if conv.last else 0


def _spread(conv: Conv) -> int:
    """Where a transposed convolution has a stride, oneDNN copies the input with borders for each thread."""
    threads, places = torch.get_num_threads(), 1
    spatial = zip(conv.input[2:], conv.output[2:], conv.stride, conv.padding, conv.reach, strict=True)
    for size, made, stride, padding, reach in spatial:
        behind = (size - 1) * stride + reach - padding - made
        places *= size + max(0, reach - 1 - padding) // stride + max(0, reach - 1 - behind) // stride
    channels = conv.groups * up(conv.channels[0], 4 // conv.dtype.itemsize)  # two of half precision
    elements, pages = up(places * channels, PAGE), 2 * threads + 2
    if conv.output[-1] % conv.stride[-1]:  # rows of the result that are cut where they end
        row = up(conv.output[-1], conv.stride[-1])
        if math.prod(conv.output[:-1]) == conv.output[1]:  # threads share one long row
            row = up(-(-row // threads), 2 * BLOCK)
        elements += up(row * conv.stride[-1] * conv.output[1], PAGE)
        pages += 1
    return threads * elements * conv.dtype.itemsize + pages * PAGE + BOOKING + pointers(conv)


def of_weight(conv: Conv, bias: bool) -> int:
    """Bytes above the weight's gradient. bias: whether the bias's is asked for too, which is not counted."""
    bias = bias and not conv.transposed  # a transposed one's is computed on its own
    conv, size = conv.turned() if conv.transposed else conv, conv.dtype.itemsize
    (given, made), threads, batch = conv.channels, torch.get_num_threads(), conv.input[0]
    block, few, more, half = BLOCK, False, 0, conv.dtype == torch.bfloat16
    if _by_depthwise(conv):
        weights = up(conv.groups, BLOCK) * conv.taps
        shares = threads if conv.last else min(max(1, threads // min(-(-conv.groups // BLOCK), threads)), batch)
        more = 4 * (shares - 1 + half) * (weights + conv.groups * bias) + 2 * BOOKING
    elif _directly(conv):
        few = _few(conv)
        weights = conv.groups * conv.taps * (given if few else up(given, BLOCK)) * up(made, BLOCK)
        if half and _pointwise(conv):
            more = bfloat16.pointwise(conv, weights, _shares(conv, few), bias)
        elif half:
            more = bfloat16.direct(conv, weights, few, bias)
        else:
            more = _sums(conv, weights, few, bias)
    elif not half and _in_narrow_blocks(conv):
        block, jobs = HALF, conv.groups * -(-given // HALF) * -(-made // HALF)
        weights = jobs * HALF**2 * conv.taps
        copies = min(threads // min(jobs, threads), batch) - 1
        more = (4 * copies * weights + BY_REDUCER) * (copies > 0) + BOOKING + _of_bias(conv, block) * bias
    else:
        return _products(conv, True) * size + BOOKING * (3 if conv.last or half else 2)
    result = math.prod(conv.weight)
    if conv.last:  # as it is, and again in channels_last
        return max((weights - result) * size + more, (weights + result) * size)
    read = 0 if few else blocked(conv.input, block)
    return max((read + blocked(conv.output, block) + weights - result) * size + more, weights * size)


def _sums(conv: Conv, weights: int, few: bool, bias: bool) -> int:
    """Bytes of the sums of the direct kernels, whose weights have so many elements."""
    given, made = conv.channels
    copies = _shares(conv, few) - 1
    more = (4 * copies * (weights + conv.groups * up(made, BLOCK)) + BARRIER + BOOKING) * (copies > 0)
    more += _of_bias(conv, BLOCK) * bias
    if _pointwise(conv) and conv.strided:  # for each thread, the places that are read
        more += 4 * torch.get_num_threads() * (given if conv.last else up(given, BLOCK)) * math.prod(conv.output[2:])
    return more


def _of_bias(conv: Conv, block: int) -> int:
    """Bytes where the bias's gradient is summed up with the weight's: whole blocks, and those that threads share."""
    jobs, threads = conv.groups * -(-conv.channels[1] // block), torch.get_num_threads()
    padded = 4 * jobs * block * (conv.channels[1] % block > 0)
    return padded + 2 * BOOKING + BY_REDUCER * (min(threads // min(jobs, threads), conv.input[0]) > 1)


def _pointwise(conv: Conv) -> bool:
    """Whether a kernel of one tap reads whole steps: as one matrix product."""
    whole = all(
        step * made == given for step, made, given in zip(conv.stride, conv.output[2:], conv.input[2:], strict=True)
    )
    alone = conv.taps == conv.groups == 1 and max(conv.padding) == 0
    return alone and whole and not (conv.strided and len(conv.input) == 5)


def _few(conv: Conv) -> bool:
    """Whether oneDNN's direct kernel of the weight's gradient reads an NCHW input as it is."""
    served = conv.channels[0] < BLOCK if BLOCK == 16 else conv.channels[0] == 3
    return served and conv.groups == 1 and not _pointwise(conv)


def _by_depthwise(conv: Conv) -> bool:
    """Whether oneDNN's own kernel for depthwise convolutions takes the weight's gradient."""
    if not conv.depthwise or len(conv.input) != 4 or conv.dilated or conv.weight[-1] > 3:
        return False
    near = all(max(pads) <= kernel // 2 for pads, kernel in zip(conv.pads, conv.weight[2:], strict=True))
    return near and conv.stride[-1] <= conv.weight[-1]


def _directly(conv: Conv) -> bool:
    """Whether oneDNN's direct kernel, of whole blocks of channels, takes the weight's gradient."""
    given, made = conv.channels
    if not conv.last and conv.groups > 1 and (given % BLOCK or made % BLOCK):
        return False
    few = _few(conv)
    # With AVX-512 oneDNN has kernels for narrower vectors that come first.
    narrow = few and not conv.last and given >= HALF // 2 and BLOCK == 16
    if conv.dtype == torch.bfloat16:
        if few and not (conv.last and given > 1) and not bfloat16.by_image_of_few(conv):
            return False
    elif narrow:
        return False
    if BLOCK < 16 and not _served_without_avx512(conv):
        return False
    steps = list(zip(conv.stride, conv.dilation, strict=True))[:-1]
    if any(stride > 1 < dilation for stride, dilation in steps) or (len(conv.input) == 5 and conv.dilation[0] > 1):
        return False
    pads = list(zip(map(max, conv.pads), conv.reach, strict=True))
    if conv.weight[-1] > 14 or pads[-1][0] > 28 or any(pad >= reach for pad, reach in pads):
        return False
    pad, reach = pads[-2]
    return pad <= reach // 2 and (conv.dilation[-2] == 1 or reach <= conv.input[-2])


def _in_narrow_blocks(conv: Conv) -> bool:
    """Whether oneDNN's kernel for narrower vectors takes the weight's gradient."""
    if conv.last or BLOCK < 16 or (conv.groups > 1 and any(one % HALF for one in conv.channels)):
        return False
    return conv.channels[0] != 3 and _served_without_avx512(conv)


def _served_without_avx512(conv: Conv) -> bool:
    """Whether a kernel for vectors of 8 numbers has what the weight's gradient needs."""
    pads = list(zip(map(max, conv.pads), conv.weight[2:], strict=True))
    if conv.dilated or any(pad >= kernel for pad, kernel in pads) or (len(conv.input) == 5 and pads[0][0] > 0):
        return False
    sizes = list(zip(conv.weight[2:], conv.input[2:], strict=True))[:-1]
    return conv.weight[-1] < 14 and all(kernel <= size for kernel, size in sizes)


def _shares(conv: Conv, few: bool) -> int:
    """Of how many shares of the images oneDNN's direct kernels add the sums: it weighs what threads read and write."""
    (given, made), batch = conv.channels, conv.input[0]
    each = torch.get_num_threads() // conv.groups
    width, point = given if few else BLOCK, _pointwise(conv)
    ins, outs = -(-given // width), -(-made // BLOCK)
    rows = conv.output[-2] if len(conv.output) == 4 and not conv.last and conv.dilation[0] == 1 else 1
    rows = rows if rows > ROWS else 1
    places = math.prod(conv.output[2:])
    if point:
        rows = -(-places // BLOCK)
    depth = conv.output[2] if len(conv.output) == 5 else 1
    most = min(each, batch * (rows if point else depth * max(1, rows // ROWS)))
    read, written = width * math.prod(conv.input[2:]) // rows // math.prod(conv.stride), BLOCK * places // rows
    sums = (12 if point else 8) * conv.taps * width * BLOCK
    ways = []
    for shares in range(1, most + 1):
        for split in range(1, min(each // shares, outs) + 1):
            a, b, part = -(-ins // min(each // shares // split, ins)), -(-outs // split), -(-batch * rows // shares)
            ways.append((part * (read * a + written * b) + sums * a * b, part * a * b, shares))
    if not ways:
        return 1
    least, work, shares = min(reversed(ways), key=lambda way: way[0])
    for cost, other, number in ways if not point else ():
        if (other <= work and cost < 1.1 * least) or 4 * other <= 3 * work:
            work, shares = other, number
    return shares


def _products(conv: Conv, weight: bool) -> int:
    """Elements above a gradient of a convolution, the weight's or the input's, where oneDNN fills columns and
    multiplies matrices.
    """
    (given, _), threads, volume = conv.channels, torch.get_num_threads(), len(conv.input) == 5
    weights, depth = math.prod(conv.weight), conv.output[2] if volume else 1
    source, places = (math.prod(shape[3:] if volume else shape[2:]) for shape in (conv.input, conv.output))
    plain = conv.taps == 1 and not conv.strided and tuple(conv.input[2:]) == tuple(conv.output[2:])
    columns = 0 if plain else given * conv.taps * places
    copies, half = threads if _by_sample(conv, weight, source, places) else 1, conv.dtype == torch.bfloat16
    sums = 4 * (copies + half) * weights if weight else 0
    if half and not weight:  # columns and sums in float32
        columns, sums = 2 * columns, 2 * copies * given * source * (conv.input[2] if volume else 1)
    if conv.last:
        image = given * source * (conv.input[2] if volume else 1)
        if weight:  # it is reordered and copied after that
            return max(copies * (columns + image) + sums, 2 * weights)
        return weights + sums + copies * (columns * depth + image * (conv.groups > 1))
    most = min(MOST_SCRATCH // 4, 15 * threads * (math.prod(conv.input) + weights + math.prod(conv.output))) - sums
    columns *= copies
    if columns > most:
        columns = int(most * (0.05 if weight else 0.1))
    return max(sums + columns, weights if weight else math.prod(conv.input))


def _by_sample(conv: Conv, weight: bool, source: int, places: int) -> bool:
    """Whether threads share out samples and groups, rather than each matrix product."""
    (given, made), threads, batch = conv.channels, torch.get_num_threads(), conv.input[0]
    several = batch > 1 or conv.groups > 2
    if weight:
        return several and places // threads < 256

    def even(work: int) -> float:
        return work / max(up(work, threads), 1)

    if conv.last:
        several = len(conv.input) < 5 and (conv.depthwise or (batch > 1 and source // threads < 64))
    else:
        several = several and (places // threads < 512 or conv.taps < 64)
    inner = -(-source // BLOCK) * -(-given // BLOCK)
    return several and (even(conv.groups * batch) >= even(inner) or source * given * made // threads < 2**16)
