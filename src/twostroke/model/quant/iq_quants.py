"""IQ1, IQ2, IQ3 and IQ4 of GGUF files: codes of unevenly spaced levels, or of codebook entries.

The layouts are ggml's (`block_iq2_xxs` and so on).

IQ1 to IQ3 have blocks of 256 values. An index selects an entry of the format's codebook: the
magnitudes of four or eight values at once. The signs of eight values are a byte, value i in bit i.
Some formats store only seven bits of it; the eighth sign then makes the number of minus signs even.
A value of IQ2 and IQ3 is a magnitude with its sign; a value of IQ1 is -1, 0 or 1, plus or minus
1/8. All values of a group are multiplied by `scale * (2 * step + 1)`, where the scale is a float16
and the step a small integer, and by a power of two. Kernels look up no codebook: `to_kernel` writes
each value's own code of three or four bits, as docs/development/kernels/packing.md says. The
kernels' block has the scale, `2 * step + 1` of each group, and a byte for each code. The highest
bit of the byte is the sign; in IQ1, the sign of the 1/8.

The codebooks are `iq1s_grid`, `iq2xxs_grid`, `iq2xs_grid`, `iq2s_grid`, `iq3xxs_grid` and
`iq3s_grid` of ggml (ggml/src/ggml-common.h in https://github.com/ggml-org/llama.cpp, read from gguf
0.19.0 on 2026-11-26). A codebook is stored as one bit for each possible combination of magnitudes,
which tells whether it is an entry. This is enough because the entries ascend, if the first
magnitude is taken as the lowest digit.

IQ4 codes are indexes into `IQ4_LEVELS`, 16 unevenly spaced levels (ggml `kvalues_iq4nl`); 16 bytes
hold the codes of 32 values, 0 to 15 in the low nibbles and 16 to 31 in the high ones.

- IQ4_NL, 32 values: a float16, the scale; then the codes.
- IQ4_XS, 256 values in 8 groups with signed 6-bit scales: a float16, the scale of the scales; 2
  bytes with the upper two bits of the scales plus 32, neighbours side by side; 4 bytes with their
  low nibbles in the same order; 128 bytes of codes.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.quant.fit import fit_scale, nearest_scaled, quantize_scales
from twostroke.model.quant.format import (
    Bytes,
    Floats,
    Format,
    ggml_format,
    half_bytes,
    half_column,
    pack_planes,
    unpack_planes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    # Scales as bytes (n, 2), groups' factors (n, groups), and codes, eight in a uint64 (n, 32).
    Parts = tuple[Bytes, Bytes, NDArray[np.uint64]]

_BLOCK_SIZE: Final = 256
_ONE_IN_EACH_BYTE: Final = np.uint64(0x0101010101010101)


class Codebook(Frozen, eq=False):
    """How kernels decode an IQ format: a value is `levels[code]` * the group's scale * `unit`.

    Kernels read blocks of 256 values with a byte for the code of each value. (The blocks of model
    files have codebook indices instead; see `CodebookGrid`.)
    """

    name: str
    kernel_id: int
    group: int
    unit: float
    levels: Floats

    @property
    def num_groups(self) -> int:
        """The number of groups in a block of 256 values."""
        return _BLOCK_SIZE // self.group

    @property
    def format(self) -> Format:
        """The number format of the blocks that the kernels read."""
        return Format(
            self.name,
            kernel_id=self.kernel_id,
            group_size=self.group,
            block_size=_BLOCK_SIZE,
            block_bytes=2 + self.num_groups + _BLOCK_SIZE,
            decode=partial(_decode, self),
        )

    def parts(self, blocks: Bytes) -> tuple[Floats, Bytes]:
        """Split the kernels' blocks into the groups' scales and the values' codes.

        The scales are float32 (n, groups), the codes uint8 (n, 256).
        """
        end = 2 + self.num_groups
        scales = half_column(blocks, 0) * np.float32(self.unit)
        return scales * blocks[:, 2:end].astype(np.float32), blocks[:, end:]


def _decode(codebook: Codebook, blocks: Bytes) -> Floats:
    scales, codes = codebook.parts(blocks)
    values = codebook.levels[codes].reshape(-1, codebook.num_groups, codebook.group)
    values *= scales[:, :, None]
    return values.reshape(-1, _BLOCK_SIZE)


def _signed(magnitudes: tuple[int, ...]) -> Floats:
    positive = np.array(magnitudes, np.float32)
    return np.concatenate([positive, -positive])


_IQ1_LEVELS: Final = np.array([-7, 1, 9, 0, -9, -1, 7, 0], np.float32)  # eighths
_IQ2_LEVELS: Final = _signed((8, 25, 43, 0))
_IQ3_XXS_LEVELS: Final = _signed((2, 6, 10, 14, 18, 22, 26, 31))  # half of ggml's levels
_IQ3_S_LEVELS: Final = _signed((1, 3, 5, 7, 9, 11, 13, 15))

# Kernel ids are numbers of `WeightType` in native/linear/linear.h.
CODEBOOKS: Final = (
    Codebook("IQ1_G16", 264, 16, 1 / 8, _IQ1_LEVELS),
    Codebook("IQ2_G16", 265, 16, 1 / 8, _IQ2_LEVELS),
    Codebook("IQ2_G32", 266, 32, 1 / 8, _IQ2_LEVELS),
    Codebook("IQ3_XXS_G32", 267, 32, 1 / 2, _IQ3_XXS_LEVELS),
    Codebook("IQ3_S_G32", 268, 32, 1, _IQ3_S_LEVELS),
)
_IQ1, _IQ2, _IQ2_XXS, _IQ3_XXS, _IQ3_S = CODEBOOKS


@cache
def _entries(name: str) -> NDArray[Any]:
    """Return the entries of the codebook `name`, each packed into an integer: a byte per code."""
    codes = unpack_codebook(name)
    entries: NDArray[Any] = codes.view(f"u{GRIDS[name].width}")[:, 0]
    return entries


@cache
def _sign_bytes(bit: int) -> NDArray[np.uint64]:
    """Return a table that spreads a byte of eight signs over eight bytes, as bit `bit` of each.

    Entry s (of 256) is an integer of eight bytes; byte i has the bit set if bit i of s is 1.
    """
    signs = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (signs << np.uint8(bit)).view(np.uint64)[:, 0]


def _even_signs() -> Bytes:
    """Return a table from the seven sign bits that IQ2 and IQ3 store to all eight sign bits.

    The eighth bit makes the number of negative values even.
    """
    low_bits = np.arange(128, dtype=np.uint8)
    odd = np.unpackbits(low_bits[:, None], axis=1).sum(axis=1) & 1
    signs: Bytes = low_bits | (odd << 7).astype(np.uint8)
    return signs


_EVEN_SIGNS: Final = _even_signs()


def _view_words(data: Bytes, dtype: type[np.unsignedinteger]) -> NDArray[np.uint32]:
    """Return the bytes of each block as little-endian words of the type `dtype`, as uint32."""
    return np.ascontiguousarray(data).view(dtype).astype(np.uint32)


def _bit_fields(
    words: NDArray[np.uint32], shifts: tuple[int, ...], mask: int
) -> NDArray[np.uint32]:
    """Extract bit fields from words: shift each word by each of `shifts`, and apply `mask`.

    Words (n, k) become (n, k * number of shifts).
    """
    fields = words[:, :, None] >> np.array(shifts, np.uint32) & np.uint32(mask)
    return fields.reshape(len(words), -1)


def _group_factors(nibbles: NDArray[Any]) -> Bytes:
    return (2 * nibbles + 1).astype(np.uint8)


def _iq2_xxs(blocks: Bytes) -> Parts:
    """Read IQ2_XXS blocks of 66 bytes; return their scales, groups' factors and codes.

    A block has the scale, and for each 32 values four codebook indices, then four signs and a step.
    A group's factor is 2 * step + 1.
    """
    words = _view_words(blocks[:, 2:], np.uint32)
    signs = _EVEN_SIGNS[_bit_fields(words[:, 1::2], (0, 7, 14, 21), 127)]
    entries = _entries("IQ2_XXS")[_bit_fields(words[:, ::2], (0, 8, 16, 24), 255)]
    return blocks[:, :2], _group_factors(words[:, 1::2] >> 28), entries | _sign_bytes(2)[signs]


def _iq2_xs(blocks: Bytes) -> Parts:
    """Read IQ2_XS blocks of 74 bytes; return their scales, groups' factors and codes.

    A block has the scale, for each 8 values a codebook index and signs, and the steps in 4 bits
    each. A group's factor is 2 * step + 1.
    """
    words = _view_words(blocks[:, 2:66], np.uint16)
    codes = _entries("IQ2_XS")[words & 511] | _sign_bytes(2)[_EVEN_SIGNS[words >> 9]]
    return blocks[:, :2], _group_factors(unpack_planes(blocks[:, 66:], 4, run=1)), codes


def _iq2_s(blocks: Bytes) -> Parts:
    """Read IQ2_S blocks of 82 bytes; return their scales, groups' factors and codes.

    A block has the scale, 32 codebook indices, 32 signs, the indices' high bits, and the steps in 4
    bits each. A group's factor is 2 * step + 1.
    """
    high = unpack_planes(blocks[:, 66:74], 2, run=1).astype(np.uint32)
    entries = _entries("IQ2_S")[blocks[:, 2:34] | high << 8]
    steps = _group_factors(unpack_planes(blocks[:, 74:], 4, run=1))
    return blocks[:, :2], steps, entries | _sign_bytes(2)[blocks[:, 34:66]]


def _iq3_xxs(blocks: Bytes) -> Parts:
    """Read IQ3_XXS blocks of 98 bytes; return their scales, groups' factors and codes.

    A block has the scale, 64 codebook indices, and for each 32 values four signs and a step. A
    group's factor is 2 * step + 1.
    """
    words = _view_words(blocks[:, 66:], np.uint32)
    signs = _EVEN_SIGNS[_bit_fields(words, (0, 7, 14, 21), 127)]
    entries = _entries("IQ3_XXS")[blocks[:, 2:66]].view(np.uint64)
    return blocks[:, :2], _group_factors(words >> 28), entries | _sign_bytes(3)[signs]


def _iq3_s(blocks: Bytes) -> Parts:
    """Read IQ3_S blocks of 110 bytes; return their scales, groups' factors and codes.

    A block has the scale, 64 codebook indices, their high bits, 32 signs, and the steps in 4 bits
    each. A group's factor is 2 * step + 1.
    """
    high = unpack_planes(blocks[:, 66:74], 1, run=1).astype(np.uint32)
    entries = _entries("IQ3_S")[blocks[:, 2:66] | high << 8].view(np.uint64)
    steps = _group_factors(unpack_planes(blocks[:, 106:], 4, run=1))
    return blocks[:, :2], steps, entries | _sign_bytes(3)[blocks[:, 74:106]]


def _iq1_s(blocks: Bytes) -> Parts:
    """Read IQ1_S blocks of 50 bytes; return their scales, groups' factors and codes.

    A block has the scale, 32 codebook indices, and for each 32 values their high bits, a step and a
    sign. A group's factor is 2 * step + 1.
    """
    words = _view_words(blocks[:, 34:], np.uint16)
    entries = _entries("IQ1_S")[blocks[:, 2:34] | _bit_fields(words, (0, 3, 6, 9), 7) << 8]
    minus = np.repeat(words >> 15, 4, axis=1) * (np.uint64(4) * _ONE_IN_EACH_BYTE)
    return blocks[:, :2], np.repeat(_group_factors(words >> 12 & 7), 2, axis=1), entries | minus


def _iq1_m(blocks: Bytes) -> Parts:
    """Read IQ1_M blocks of 56 bytes; return their scales, groups' factors and codes.

    A block has 32 codebook indices, their high bits and signs in 4 bits each, and four words of
    steps. The scale is in the upper 4 bits of these words. A group's factor is 2 * step + 1.
    """
    nibbles = unpack_planes(blocks[:, 32:48], 4, run=1).astype(np.uint32)
    entries = _entries("IQ1_S")[blocks[:, :32] | (nibbles & 7) << 8]
    words = _view_words(blocks[:, 48:], np.uint16)
    shifts = np.array([0, 4, 8, 12], np.uint32)
    scale = np.bitwise_or.reduce(words >> 12 << shifts, axis=1).astype(np.uint16)
    minus = (nibbles >> 3) * (np.uint64(4) * _ONE_IN_EACH_BYTE)
    steps = _group_factors(_bit_fields(words, (0, 3, 6, 9), 7))
    return scale.view(np.uint8).reshape(-1, 2), steps, entries | minus


class _CodebookLayout(Frozen, eq=False):
    """The layout of an IQ format in GGUF files: its codebook, block size, and block reader."""

    book: Codebook
    block_bytes: int
    read: Callable[[Bytes], Parts]

    def to_kernel(self, data: Bytes) -> Bytes:
        """Convert rows of GGUF blocks, uint8 (rows, row_bytes), to the blocks that kernels read."""
        scales, steps, codes = self.read(data.reshape(-1, self.block_bytes))
        parts = [scales, steps, codes.view(np.uint8)]
        return np.concatenate(parts, axis=1).reshape(len(data), -1)

    def decode(self, blocks: Bytes) -> Floats:
        """Decode blocks of the IQ format (n, block_bytes) to float32 (n, 256)."""
        return _decode(self.book, self.to_kernel(blocks))


def _format(name: str, gguf_id: int, layout: _CodebookLayout, packed_bits: float) -> Format:
    return Format(
        name,
        kernel_id=layout.book.kernel_id,
        group_size=layout.book.group,
        block_size=_BLOCK_SIZE,
        block_bytes=layout.block_bytes,
        decode=layout.decode,
        gguf_id=gguf_id,
        to_kernel=layout.to_kernel,
        packed_bits=packed_bits,
    )


IQ1_S = _format("IQ1_S", 19, _CodebookLayout(_IQ1, 50, _iq1_s), 3.625)
IQ1_M = _format("IQ1_M", 29, _CodebookLayout(_IQ1, 56, _iq1_m), 3.625)
IQ2_XXS = _format("IQ2_XXS", 16, _CodebookLayout(_IQ2_XXS, 66, _iq2_xxs), 3.375)
IQ2_XS = _format("IQ2_XS", 17, _CodebookLayout(_IQ2, 74, _iq2_xs), 3.625)
IQ2_S = _format("IQ2_S", 22, _CodebookLayout(_IQ2, 82, _iq2_s), 3.625)
IQ3_XXS = _format("IQ3_XXS", 18, _CodebookLayout(_IQ3_XXS, 98, _iq3_xxs), 4.375)
IQ3_S = _format("IQ3_S", 21, _CodebookLayout(_IQ3_S, 110, _iq3_s), 4.375)


class CodebookGrid(Frozen):
    """The shape of a codebook: each entry is `width` digits below `num_levels`.

    The stored codebooks have one bit for each possible entry, which tells whether the entry exists.
    This codebook's bits begin at byte `start`.
    """

    num_levels: int
    width: int
    start: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the codebook's bits, with one bit for each possible entry."""
        return (int(self.num_levels**self.width) + 7) // 8


GRIDS: Final = {
    "IQ1_S": CodebookGrid(3, 8, 0),
    "IQ2_XXS": CodebookGrid(3, 8, 821),
    "IQ2_XS": CodebookGrid(3, 8, 1642),
    "IQ2_S": CodebookGrid(3, 8, 2463),
    "IQ3_XXS": CodebookGrid(8, 4, 3284),
    "IQ3_S": CodebookGrid(8, 4, 3796),
}


def unpack_codebook(name: str) -> Bytes:
    """Return the entries of the codebook `name` in order, as digits: uint8 (entries, width)."""
    grid = GRIDS[name]
    bits = np.frombuffer(_unpacked_bits(), np.uint8)[grid.start : grid.start + grid.num_bytes]
    numbers = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    digits = numbers[:, None] // grid.num_levels ** np.arange(grid.width) % grid.num_levels
    return digits.astype(np.uint8)


@cache
def _unpacked_bits() -> bytes:
    return zlib.decompress(base64.b85decode(_PACKED_BITS))


_PACKED_BITS: Final = (
    b"c-nPWO^h5z6@FDzp_+EEs+VrX;#AvShfX`PjBkWXwKXFd`_dCli@Q%Ipa^m1r`_y^ac_`f3j~5oyRnmTJ92^#$c!aN$|"
    b"*z~K-_Y$z=sI04@kLyj6`@<)jd74IIWr8nR<WUd-c6nHTj8Pucl|GV)C`c>#AzLA`%tsWkIRNlM^AYX{qMNK$P_tl6ro"
    b">_1<icKm=a<Mp+AuR@?I;3(&keEq+ytBEgklPn|oPiwSw@gIZNDK(e!F8}aB}A>tS?R@}yFQ7G>>;t$J(`smJ;=1%+a5"
    b"1t$>@0UmKMaz%=dh{BNAX1BJ>6KJKa{h14HzIYify?@GTg4(Gh%hYGXtF)qs|7v2cv<b1YKAZxC4P|wG!gd}Wl^7_N|e"
    b"o|hQ_xOv4@{ei-`t<u!gf!n2;AssLDiKKOJyPId<SFRc!)l>vz?ic(J_RF1`n)CukheT`1vPQ6IdQv>&MbWpwcI+xz>k"
    b"Ew17B@9$UR=Mr^pSI1Q%TJ_<dny7jA*Y!UZ6euK%IjExEZ<=^n7v&jm`QYC2zfYR_WFsmsK4{?j8T#DQ8wU^nd2(^;XA"
    b"ge#<mtbD{Qf6DTt58vf4=(J`!77*di?h)lI??|yREppI8xsEY`OFJCk4Cs(xp!q-i?!hDT_z#7SJ;B-co-oue@2t(7+q"
    b"Tm!T8_zFW2Jefrjes{V);-}&XKKi_>UOL?k&7>9qk$-pypP=Z`nW&8DIbY{066~~}zF4D`v7z?%iPHA_!RdM@MZ_Dm7u"
    b"Z5uvQMA@g1alCLc(r=%UfUL+yz<e9(Y6>Ht5KywWYp`PXp^J>&sc3Qz&d=S=B0NGx1ep>>b-sHB^aVCS}ztc+?vy<esC"
    b"ndC#vOzyO{Egf8S}<EAge@*QY-zJc>+s^&%39w(ZIGpt)5yLP%9t5tK*WE_;@ux4sDHTPkjX{L;AFWsa0C-}zJl0LJo`"
    b">Y$-eo*TuF1Mn|Q3^x|kBAoAtdF*L{E0{7h4oMycxg4h{uwV=leJ~9HXfU4uGO1G^NWgT4>nP^<&HxA)l@!;5z$&_zwU"
    b"W?10h1Edm=BEL2W_nIAx=>;jV_&)?A|tndpI#7gTwEathw%7o3DgBPtGXo^+2a6)x9?BY&w~FIRp$g9|tePYDkGGgLLL"
    b"&FxWf%T3R(}fUYtnFr*BU49+F#i(=n$Y%wxoP1uI*fKih*k8GvGBpWd6b+LU?t42DJ9@H#If5<X;X6|b_9DYnSyRBe)W"
    b"w>%+X`_cEZA4phvXRz$gdsg5`!cNKhQ5aSnN}N*{2bW|$>C}~<MT5g_W5dgo=@{h8cxV8&$CG?k*%{S_6h?+ATy%SFbG"
    b"9RWX5a}C3o!0xgWTO=r}G7LPi{6X89DYbng&F8DxH6PUCQ5Yo^maFS{r1Bj?cdl)nL9cc`61V3{;gyRIWnahzJ_^-bf1"
    b"q_3S!iH#zApSBN(E&kZ0Z1d_;hB2m>lHMT}%JvgMk=t->3Z>=HG=y|fQyYKaO;=u<G6TNJYtXj5(v&B43vz9sFsz2w9Y"
    b"3VrAc^j3C=IM^lTnT|M6YqdwY5CVJ0Kf{X8kzQAtxa-ezTBty$d!AQ{^<6*{0EJ{M19UqqZrwnXHEyD;aauAg<lzCcV+"
    b"g*bD=?4l+30A#8K94D%Pc#n#4>t)&k7C=52I%Vsf6@JY7?9cn)OMYyhM@{s$v;dmbKFhGuHIRoFve-l&)XOn4`=K;P9{"
    b"ZTXxEL+3eSRqX`&)FD7X2%1`-Kl|1GeytgG{Al|A@Tsv<TPa*EF}krMr0iZ+))zyamtJcGj<~BW^Kpx*)*J{oDm;p8Md"
    b"Xfk}x&>%3+LIY&i7$qstom2t(THgsZl(9g2TU)0mt?yp<qA-XTmwW>Pk|^4tvraH1^j5uyVbI1wA>goaG^TZ0ZmYX$$8"
    b"a$qMx&{?e<LI>Waj3PUE2ZwH2Sbj}HjtI519Je);1_ra7A=7n-(#lrdA#F9>(2*N7ax($vgdfa&oHa0U;BgrEVP}QA?0"
    b"3_pPnj4|wwh2zWZaO|d15_t!<9)cJ1e^>vL8H-vCpWXFIQ=s;Z24+hJT3p$ljUk4|du2sSey|oOTXLH*pW0FS-Z1HUu;"
    b"YNLQw?;uKe6k4K#1qzWmo@aC>cuAGs8LKYC0u&T4NmQz3x1&@1SVW>)7GkTobLCb+q6FORjwr31gYw*l6_a-JjB-U<Dc"
    b"*zTbO4Jp>xABCDRbaFsK~GyCK)Hwhm5pbL=NV&zlo~6Sc!4Xa0k3S*8k|Vj`Bp%U_wlu%OE8@jqxI@0i0omkhMeNVWTy"
    b"6T(7l1Zrm!vo5bK;dwe^cef6^I(8UNJ1i`7_7*G~d9>}Utxxm&DeL3fogX`11_f=jI?A4<1zO1=H9<Km{ruRVYKN+cm-"
    b"zx`(9-|%20B7R=-A|mrGHlpUNn1}|n&>p(O>W28;?9TJI`74l7cEP73q(Dk;_-v#IyEZC)R3vc#-Wc_))Iz>$Nsc^GMt"
    b"(c5c*2Vp`IVh5hVpCRU8Zx`Iza=EVY`$t+QH==Nm)SzkUirBEfv*7m`iTUlAlvS6X}^VU`!Z7C5As0sjvp(EPBOX2$U;"
    b"^r?{{rH1WX^+-FxAGLP(fY+E2%y=^K;f!8N&2zR(hLvLDJD`pDst~A>~1THb3!Breq39~e2go@NueivCM@h9~b{v2_aS"
    b"8al>8Z+pJR$^AoVSBm1PfDg3A(D0*Wj2z*sJlw3egivSS8@87D-T1C#`t|J#cZgJv14#VqQC94{{BqYN$@|?P3i;"
)

IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
_TRIAL_PEAKS = (-151, -143, -135, -127, -119, -111, -104, -97, 97, 105, 113, 121, 129, 137)

# The nearest code for each multiple of 1/2 from -128 on; midpoints of levels are such multiples.
_IQ4_MIDDLES = (IQ4_LEVELS[1:] + IQ4_LEVELS[:-1]) / 2
_CODE_OF_HALF_STEP = np.searchsorted(_IQ4_MIDDLES, np.arange(-256, 256) / 2, side="right").astype(
    np.uint8
)


def decode_iq4_nl(blocks: Bytes) -> Floats:
    """Decode IQ4_NL blocks, bytes (n, 18), to float32 (n, 32)."""
    values = IQ4_LEVELS[unpack_planes(blocks[:, 2:], 4, run=16)]
    values *= half_column(blocks, 0)
    return values


def encode_iq4_nl(values: Floats) -> Bytes:
    """Encode float32 (n, 32) as IQ4_NL blocks, bytes (n, 18).

    The scale is fitted by least squares.
    """
    scale = half_bytes(fit_scale(values, nearest_level, _TRIAL_PEAKS))
    levels = nearest_scaled(values[:, None], half_column(scale, 0), nearest_level)
    codes = level_codes(levels.reshape(-1, 32))
    return np.concatenate([scale, pack_planes(codes, 4, run=16)], axis=1)


def decode_iq4_xs(blocks: Bytes) -> Floats:
    """Decode IQ4_XS blocks, bytes (n, 136), to float32 (n, 256)."""
    scale_codes = unpack_planes(blocks[:, 4:8], 4, run=1)
    scale_codes |= unpack_planes(blocks[:, 2:4], 2, run=1) << np.uint8(4)
    scales = half_column(blocks, 0) * (scale_codes.astype(np.float32) - np.float32(32))
    values = IQ4_LEVELS[unpack_planes(blocks[:, 8:], 4, run=16)].reshape(-1, 8, 32)
    values *= scales[:, :, None]
    return values.reshape(-1, 256)


def encode_iq4_xs(values: Floats) -> Bytes:
    """Encode float32 (n, 256) as IQ4_XS blocks, bytes (n, 136).

    The groups' scales are fitted by least squares.
    """
    groups = values.reshape(-1, 8, 32)
    scale, scale_codes = quantize_scales(
        fit_scale(groups, nearest_level, _TRIAL_PEAKS)[:, :, 0], -32, 31
    )
    codes = level_codes(nearest_scaled(groups, scale * scale_codes, nearest_level)).reshape(-1, 256)
    return pack_iq4_xs(scale, scale_codes, codes)


def pack_iq4_xs(scale: Floats, scale_codes: Floats, codes: Bytes) -> Bytes:
    """Pack block scales (n, 1), group scales (n, 8) and codes (n, 256) into IQ4_XS blocks."""
    unsigned_codes = (scale_codes + np.float32(32)).astype(np.uint8)
    parts = [
        half_bytes(scale),
        pack_planes(unsigned_codes >> np.uint8(4), 2, run=1),
        pack_planes(unsigned_codes & np.uint8(15), 4, run=1),
        pack_planes(codes, 4, run=16),
    ]
    return np.concatenate(parts, axis=1)


def nearest_level(values: Floats) -> Floats:
    """Round each value to the nearest of the 16 levels of IQ4 formats."""
    return IQ4_LEVELS[level_codes(values)]


def level_codes(values: Floats) -> Bytes:
    """Return the index of the IQ4 level that is nearest to each value."""
    half_steps = np.clip(np.floor(values * np.float32(2)), np.float32(-256), np.float32(255))
    codes: Bytes = _CODE_OF_HALF_STEP[half_steps.astype(np.int16) + np.int16(256)]
    return codes


IQ4_NL = ggml_format("IQ4_NL", 20, (32, 32, 18), decode_iq4_nl, encode_iq4_nl)
IQ4_XS = ggml_format("IQ4_XS", 23, (32, 256, 136), decode_iq4_xs, encode_iq4_xs)
