"""The codebooks of IQ1, IQ2 and IQ3: which of all combinations of magnitudes they hold.

They are `iq1s_grid`, `iq2xxs_grid`, `iq2xs_grid`, `iq2s_grid`, `iq3xxs_grid` and `iq3s_grid` of
ggml (ggml/src/ggml-common.h in https://github.com/ggml-org/llama.cpp, read from gguf 0.19.0 on
2026-11-26). Entries ascend if the first value is taken as the lowest digit, so that a bit for each
combination says all.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache
from typing import Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.quant.format import Bytes  # noqa: TC001


class CodebookGrid(Frozen):
    """The shape of a codebook: `width` digits below `num_levels`, and where its bits begin."""

    num_levels: int
    width: int
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its bits."""
        return (int(self.num_levels**self.width) + 7) // 8


GRIDS: Final = {
    "IQ1_S": CodebookGrid(3, 8, 0),
    "IQ2_XXS": CodebookGrid(3, 8, 821),
    "IQ2_XS": CodebookGrid(3, 8, 1642),
    "IQ2_S": CodebookGrid(3, 8, 2463),
    "IQ3_XXS": CodebookGrid(8, 4, 3284),
    "IQ3_S": CodebookGrid(8, 4, 3796),
}


def codebook(name: str) -> Bytes:
    """Return the entries of a codebook in order, uint8 (entries, width), digits."""
    grid = GRIDS[name]
    bits = np.frombuffer(_bits(), np.uint8)[grid.start : grid.start + grid.num_bytes]
    numbers = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    digits = numbers[:, None] // grid.num_levels ** np.arange(grid.width) % grid.num_levels
    return digits.astype(np.uint8)


@cache
def _bits() -> bytes:
    return zlib.decompress(base64.b85decode(_PACKED))


_PACKED: Final = (
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
