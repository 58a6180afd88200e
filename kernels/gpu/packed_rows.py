"""Quantised rows as GPU kernels read them, and the function that unpacks them in registers.

A row is one run of bytes: the low bits of its codes, the rest of their bits, then the numbers of superblocks, scales,
leasts and zeros of its groups, in the bits of the checkpoint (`kernels.weight_codes`). Scales and leasts of 4 or 6 bits
lie as their low bits, a byte for both, and the rest, a byte for two groups. No format is rounded: an
unpacked weight is the one that a CPU widens to, until it is rounded to the dtype of the product.

Codes lie in chunks of a few parts of `width` weights. Byte j of a chunk holds the low bits of weight j of each part, so
that a program loads neighbouring bytes and has neighbouring weights in each part. The other bits of a chunk lie in the
same way, in fewer bytes.
"""

from __future__ import annotations

from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.moe_config import MAX_CHUNK
from kernels.weight_codes import CODINGS, TABLES, CodedBlocks, Coding, coded
from kernels.weight_formats import FP8_BLOCK, QuantizedRows, WeightFormat

_ALIGNMENT = 16  # Bytes; rows begin at multiples of it.
_AT_ONCE = 1 << 25  # Weights that are packed at a time: codes take a few bytes each meanwhile.
_WIDTHS = (64, 32, 16)  # Weights of a part, the most that divide a row.
_FP8_MAX = tl.constexpr(448.0)  # the greatest number of e4m3
# The greatest number of a group counts as no less, so that zeros can be divided by its scale.
_LEAST_MAXIMUM = tl.constexpr(1e-10)
_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "e8m0": 1, "e4m3": 1, "uint4": 1, "uint6": 1, "int8": 1}
_TYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "int8": tl.int8}


class PackedForm(str):
    """Where the numbers of a row of `depth` weights in a format lie; an argument of kernels that they are compiled for.

    name: of the format. in_fp8: products are of floats of 8 bits, to which activations are rounded. Offsets are in
    bytes from the start of a row. It is a string because Triton writes constants of kernels as JSON.
    """

    def __new__(cls, name: str, depth: int, in_fp8: bool = False) -> PackedForm:
        return super().__new__(cls, f"{name}:{depth}:fp8" if in_fp8 else f"{name}:{depth}")

    def __init__(self, name: str, depth: int, in_fp8: bool = False) -> None:
        self.name, self.depth, self.in_fp8 = name, depth, in_fp8

    @property
    def coding(self) -> Coding:
        return CODINGS[self.name]

    def mangle(self) -> str:
        """Return the name of this constant in a compiled kernel's name."""
        return f"{self.name}_{self.depth}{'_fp8' * self.in_fp8}"

    @cached_property
    def low_bits(self) -> int:
        """The bits of a code that lie in the first plane: 8, 4 or 2."""
        return next(bits for bits in (8, 4, 2) if bits <= self.coding.bits)

    @property
    def high_bits(self) -> int:
        return self.coding.bits - self.low_bits

    @property
    def parts(self) -> int:
        """The parts of a chunk."""
        return 8 // self.low_bits

    @cached_property
    def width(self) -> int:
        """The weights of a part."""
        chunks = ((width, width * self.parts) for width in _WIDTHS)
        return next(width for width, chunk in chunks if chunk <= MAX_CHUNK and self.depth % chunk == 0)

    @property
    def chunks(self) -> int:
        return self.depth // (self.width * self.parts)

    @property
    def group(self) -> int:
        return self.coding.group

    @property
    def whole_group(self) -> int:
        """The weights that share the number of a superblock. All of a row of NVFP4 do."""
        return self.depth if self.coding.whole == "float32" else 256

    @property
    def high_at(self) -> int:
        return self.depth * self.low_bits // 8

    @property
    def whole_at(self) -> int:
        return self.high_at + self.depth * self.high_bits // 8

    @property
    def _num_wholes(self) -> int:
        return self.depth // self.whole_group if self.coding.whole else 0

    @property
    def whole_least_at(self) -> int:
        return self.whole_at + self._num_wholes * _SIZES.get(self.coding.whole, 0)

    @property
    def scale_at(self) -> int:
        has_leasts = self.coding.least == "subtracted"
        return self.whole_least_at + self._num_wholes * _SIZES["float16"] * has_leasts

    @property
    def least_at(self) -> int:
        return self.scale_at + self.depth // self.group * _SIZES[self.coding.scale]

    @property
    def zero_at(self) -> int:
        num_groups = self.depth // self.group
        if self.coding.least == "added":
            return self.least_at + num_groups * _SIZES["float16"]
        return self.least_at + num_groups // 2 * (self.coding.scale == "uint6")

    @cached_property
    def row_bytes(self) -> int:
        end = self.zero_at + self.depth // self.group * self.coding.has_zeros
        return -(-end // _ALIGNMENT) * _ALIGNMENT

    @property
    def words(self) -> tuple[int, ...]:
        """The sixteen values of codes of 4 bits, four to an int32."""
        values = bytes(value & 255 for value in TABLES[self.coding.values])
        return tuple(int.from_bytes(values[i : i + 4], "little", signed=True) for i in range(0, 16, 4))

    @property
    def scale_pointer(self) -> tl.pointer_type:
        return tl.pointer_type(_TYPES.get(self.coding.scale, tl.uint8))

    @property
    def whole_pointer(self) -> tl.pointer_type:
        return tl.pointer_type(_TYPES[self.coding.whole])


def packed_form(form: WeightFormat, depth: int, *, fp8_products: bool = False) -> PackedForm:
    """Return the form of rows of `depth` weights in a format. Raise ValueError unless they are whole blocks.

    fp8_products: see `kernels.gpu.moe_config.WeightStorage`.
    """
    form.row_bytes(depth)
    return PackedForm(form.name, depth, fp8_products and form == FP8_BLOCK)


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Round rows [M, K] as products in fp8 do: to e4m3, each 128 columns of a row by a scale of their own; fp32."""
    groups = x.float().unflatten(1, (-1, FP8_BLOCK.block))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=_LEAST_MAXIMUM.value) / _FP8_MAX.value
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)


def pack_rows(rows: QuantizedRows, device: torch.device) -> Tensor:
    """Return rows as the kernels read them, uint8 [N, row_bytes] on the device, in the order of their own columns."""
    form = packed_form(rows.format, rows.depth)
    num_rows, data = rows.shape[0], rows.data
    out = torch.zeros((num_rows, form.row_bytes), dtype=torch.uint8, device=device)
    band = max(1, _AT_ONCE // rows.depth)
    for first in range(0, num_rows, band):
        blocks = data[first : first + band].to(device)
        _pack_into(out[first : first + band], blocks.reshape(len(blocks), -1, rows.format.block_bytes), form)
    return out


def _pack_into(out: Tensor, blocks: Tensor, form: PackedForm) -> None:
    parts = coded(form.name, blocks)
    fields = [_plane(parts.codes & (255 >> 8 - form.low_bits), form, form.low_bits)]
    if form.high_bits:
        fields.append(_plane(parts.codes >> form.low_bits, form, form.high_bits))
    first = 0
    for field in (*fields, *_numbers(form, parts)):
        out[:, first : first + field.shape[1]] = field
        first += field.shape[1]


def _plane(codes: Tensor, form: PackedForm, bits: int) -> Tensor:
    """Return bits of the codes [N, B, block] as bytes [N, depth * bits / 8]."""
    per_byte = 8 // bits
    chunks = codes.reshape(len(codes), form.chunks, per_byte, -1)
    packed = chunks[:, :, 0]
    for place in range(1, per_byte):
        packed = packed | chunks[:, :, place] << place * bits
    return packed.flatten(1)


def _numbers(form: PackedForm, parts: CodedBlocks) -> list[Tensor]:
    """Return the bytes [N, ...] of all but the codes, in their order."""
    wholes = parts.wholes
    if wholes is not None and form.whole_group == form.depth:
        if bool((wholes != wholes[:, :1]).any()):
            raise ValueError("a row has several numbers of superblocks")
        wholes = wholes[:, :1]
    scales, leasts = parts.scales, parts.leasts
    if leasts is not None and form.coding.least == "subtracted":
        rest = (scales >> 4 | leasts >> 4 << 2).flatten(1)
        scales, leasts = scales & 15 | leasts << 4, None
        if form.coding.scale == "uint6":
            leasts = rest[:, ::2] | rest[:, 1::2] << 4
    fields = (wholes, parts.whole_leasts, scales, leasts, parts.zeros)
    return [field.flatten(1).contiguous().view(torch.uint8) for field in fields if field is not None]


@triton.jit
def multiply_packed(
    a_rows, w_rows, v_rows, FORM: tl.constexpr, TWO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Multiply rows of a with rows of w, and of v if TWO: fp32 [BLOCK_M, BLOCK_N] each.

    a_rows [BLOCK_M]: pointers to rows of floats. w_rows and v_rows [BLOCK_N]: pointers to packed rows.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_v = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if FORM.in_fp8:
        acc, acc_v = _multiply_in_fp8(acc, acc_v, a_rows, w_rows, v_rows, FORM, TWO)
    else:
        PARTS: tl.constexpr = FORM.parts
        WIDTH: tl.constexpr = FORM.width
        for chunk in range(0, FORM.chunks):
            low = _load_low(w_rows, chunk, FORM)
            low_v = low
            if TWO:
                low_v = _load_low(v_rows, chunk, FORM)
            for part in tl.static_range(PARTS):
                column = (chunk * PARTS + part) * WIDTH + tl.arange(0, WIDTH)
                a = tl.load(a_rows[:, None] + column[None, :])
                w = _unpack_part(w_rows, low, chunk, part, FORM, a.dtype)
                acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
                if TWO:
                    v = _unpack_part(v_rows, low_v, chunk, part, FORM, a.dtype)
                    acc_v = tl.dot(a, tl.trans(v), acc_v, input_precision="ieee")
    return acc, acc_v


@triton.jit
def _multiply_in_fp8(acc, acc_v, a_rows, w_rows, v_rows, FORM: tl.constexpr, TWO: tl.constexpr):
    """Do as `multiply_packed` with e4m3 of both sides, and add the sums to `acc` and `acc_v`.

    Each group of a row of a is rounded by its greatest number, as `rounded_to_fp8` does. The tensor cores sum within a
    group, Hopper's with fewer bits than fp32; sums of groups are scaled and added in fp32.
    """
    GROUP: tl.constexpr = FORM.group
    for group in range(0, FORM.depth // GROUP):
        column = group * GROUP + tl.arange(0, GROUP)
        a = tl.load(a_rows[:, None] + column[None, :]).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(a), 1), _LEAST_MAXIMUM) / _FP8_MAX
        a = (a / scale[:, None]).to(tl.float8e4nv)
        acc += _group_in_fp8(a, w_rows, column, group, FORM) * scale[:, None]
        if TWO:
            acc_v += _group_in_fp8(a, v_rows, column, group, FORM) * scale[:, None]
    return acc, acc_v


@triton.jit
def _group_in_fp8(a, rows, column, group, FORM: tl.constexpr):
    """Return products of a [M, G] in e4m3 with a group of packed rows [N], by the rows' scales: fp32 [M, N]."""
    w = tl.load(rows[None, :] + column[:, None]).to(tl.float8e4nv, bitcast=True)
    return tl.dot(a, w) * tl.load((rows + FORM.scale_at).to(FORM.scale_pointer) + group)[None, :]


@triton.jit
def _load_low(rows, chunk, FORM: tl.constexpr):
    """Load the low bits of a chunk's codes, [N, width] bytes. rows [N]: pointers to rows of bytes."""
    column = tl.arange(0, FORM.width)
    return tl.load(rows[:, None] + (chunk * FORM.width + column)[None, :])


@triton.jit
def _unpack_part(rows, low, chunk, PART: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Return the weights of a part of a chunk, [N, width] of DTYPE. low: the result of `_load_low`."""
    N: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = FORM.width
    GROUPS: tl.constexpr = WIDTH // FORM.group if FORM.group < WIDTH else 1
    codes = low
    if FORM.low_bits < 8:
        codes = (low >> (PART * FORM.low_bits)) & (255 >> 8 - FORM.low_bits)
    if FORM.high_bits > 0:
        codes = codes | _high(rows, chunk, PART, FORM)
    index = (chunk * FORM.parts + PART) * WIDTH // FORM.group + tl.arange(0, GROUPS)
    # By group: one scale for its weights.
    values = tl.reshape(_values(codes, FORM), [N, GROUPS, WIDTH // GROUPS])
    if FORM.coding.has_zeros:
        values -= tl.load((rows + FORM.zero_at)[:, None] + index[None, :]).to(tl.float32)[:, :, None]
    if FORM.coding.least == "subtracted":
        scales, leasts = _integers(rows, index, FORM)
        values *= (scales * _of_whole(rows + FORM.whole_at, index, FORM))[:, :, None]
        values -= (leasts * _of_whole(rows + FORM.whole_least_at, index, FORM))[:, :, None]
    else:
        values *= _scales(rows, index, FORM)[:, :, None]
    if FORM.coding.least == "added":
        leasts = (rows + FORM.least_at).to(tl.pointer_type(tl.float16))
        values += tl.load(leasts[:, None] + index[None, :]).to(tl.float32)[:, :, None]
    return tl.reshape(values, [N, WIDTH]).to(DTYPE)


@triton.jit
def _high(rows, chunk, PART: tl.constexpr, FORM: tl.constexpr):
    """Return the other bits of a part's codes in their places."""
    SIZE: tl.constexpr = FORM.width * FORM.parts * FORM.high_bits // 8
    place = PART * FORM.width + tl.arange(0, FORM.width)
    high = tl.load(rows[:, None] + (FORM.high_at + chunk * SIZE + place % SIZE)[None, :])
    shift = (place // SIZE * FORM.high_bits).to(tl.uint8)
    return ((high >> shift[None, :]) & (255 >> 8 - FORM.high_bits)) << FORM.low_bits


@triton.jit
def _values(codes, FORM: tl.constexpr):
    """Return what codes stand for, in fp32."""
    if FORM.coding.values == "unsigned":
        return codes.to(tl.float32) - FORM.coding.offset
    elif FORM.coding.values == "signed":
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORM.coding.values == "e4m3":
        return _e4m3(codes)
    elif FORM.coding.values == "e2m1":
        return _e2m1(codes)
    else:
        # Four values lie in a word; the code's last two bits say which byte, and a shift back extends its sign.
        number = codes.to(tl.int32)
        low = tl.where((number & 4) == 0, FORM.words[0], FORM.words[1])
        high = tl.where((number & 4) == 0, FORM.words[2], FORM.words[3])
        word = tl.where((number & 8) == 0, low, high)
        return ((word << (24 - (number & 3) * 8)) >> 24).to(tl.float32)


@triton.jit
def _e2m1(codes):
    """Widen floats of 4 bits, doubled, as `_e4m3` does those of 8."""
    bits = codes.to(tl.uint16)
    return (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32) * 32768.0


@triton.jit
def _e4m3(codes):
    """Widen floats of 8 bits by way of float16, which every GPU converts, subnormal numbers too."""
    bits = codes.to(tl.uint16)
    return (((bits & 127) << 7) | ((bits & 128) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _scales(rows, index, FORM: tl.constexpr):
    """Return the scales of groups [G] of rows [N] in fp32, [N, G]."""
    stored = tl.load((rows + FORM.scale_at).to(FORM.scale_pointer)[:, None] + index[None, :])
    if FORM.coding.scale == "e8m0":
        exponent = stored.to(tl.int32)
        subnormal = tl.where(exponent < 1, 0x200000, 0x400000)
        scales = tl.where(exponent < 2, subnormal, (exponent - 1) << 23).to(tl.float32, bitcast=True)
    elif FORM.coding.scale == "e4m3":
        scales = _e4m3(stored)
    else:
        scales = stored.to(tl.float32)
    if FORM.coding.whole != "":
        scales *= _of_whole(rows + FORM.whole_at, index, FORM)
    return scales


@triton.jit
def _integers(rows, index, FORM: tl.constexpr):
    """Return the scales and the leasts of groups [G] of rows [N], integers in fp32, [N, G] each."""
    low = tl.load((rows + FORM.scale_at)[:, None] + index[None, :])
    scales, leasts = low & 15, low >> 4
    if FORM.coding.scale == "uint6":
        pairs = tl.load((rows + FORM.least_at)[:, None] + (index // 2)[None, :])
        rest = pairs >> (index % 2 * 4).to(tl.uint8)[None, :]
        scales |= (rest & 3) << 4
        leasts |= ((rest >> 2) & 3) << 4
    return scales.to(tl.float32), leasts.to(tl.float32)


@triton.jit
def _of_whole(numbers, index, FORM: tl.constexpr):
    """Return superblocks' numbers for groups [G] of rows, fp32 [N, G]. numbers [N]: pointers to the first of a row."""
    place = index * FORM.group // FORM.whole_group
    return tl.load(numbers.to(FORM.whole_pointer)[:, None] + place[None, :]).to(tl.float32)


def look_up_packed(table: Tensor, form: PackedForm, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `ids` [T] of a packed table [N, row_bytes], unpacked: [T, depth] of `dtype`."""
    out = torch.empty((len(ids), form.depth), dtype=dtype, device=table.device)
    if len(ids):
        _look_up_kernel[(triton.cdiv(len(ids), 16), form.chunks)](table, ids, out, len(ids), FORM=form, BLOCK=16)
    return out


@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["ids"])
def _look_up_kernel(table, ids, out, num_ids, FORM: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + tl.minimum(place, num_ids - 1)).to(tl.int64)
    chunk = tl.program_id(1)
    rows = table + row * FORM.row_bytes
    low = _load_low(rows, chunk, FORM)
    PARTS: tl.constexpr = FORM.parts
    for part in tl.static_range(PARTS):
        weights = _unpack_part(rows, low, chunk, part, FORM, out.dtype.element_ty)
        column = (chunk * PARTS + part) * FORM.width + tl.arange(0, FORM.width)
        places = out + place.to(tl.int64)[:, None] * FORM.depth + column[None, :]
        tl.store(places, weights, mask=(place < num_ids)[:, None])
