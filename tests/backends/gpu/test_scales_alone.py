"""With 8-bit pages and `--same-tokens`, tokens that a row does not see change nothing."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
triton = pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

import triton.language as tl  # noqa: E402

from twostroke.backends.gpu.kernels.token_blocks import add_block, empty_sums  # noqa: E402


@triton.jit
def _mixed(scores, values, scales, output, alone: tl.constexpr):
    rows, tokens, dims = tl.arange(0, 16), tl.arange(0, 32), tl.arange(0, 16)
    top, total, mixed, unit = empty_sums(16, 16)
    score_row = tl.load(scores + tokens)[None, :] + tl.zeros((16, 32), tl.float32)
    block = tl.load(values + tokens[:, None] * 16 + dims[None, :]), tl.load(scales + tokens)
    top, total, mixed, unit = add_block(
        score_row, block[0], block[1], top, total, mixed, unit, 1.0, "int8", alone
    )
    tl.store(output + rows[:, None] * 16 + dims[None, :], mixed * unit)


def mixed(unseen_scale: float, *, alone: bool) -> torch.Tensor:
    """Return the attention of rows that see all tokens but the last, whose scale is given."""
    rng = np.random.default_rng(3)
    scores = torch.from_numpy(-15 * rng.random(32).astype(np.float32))
    scores[-1] = -torch.inf
    values = torch.from_numpy(rng.integers(-127, 128, (32, 16)).astype(np.float16))
    scales, output = torch.full((32,), 0.01), torch.zeros(16, 16)
    scales[-1] = unseen_scale
    _mixed[1,](scores, values, scales, output, alone=alone)
    return output


def test_an_unseen_tokens_scale_changes_nothing() -> None:
    assert torch.equal(mixed(0.01, alone=True), mixed(80.0, alone=True))


def test_scales_of_shares_differ_by_what_float16_rounds() -> None:
    """Without `--same-tokens`, results differ a little, but are computed faster."""
    close_mix, distant_mix = mixed(0.01, alone=False), mixed(80.0, alone=False)
    assert not torch.equal(close_mix, distant_mix)
    torch.testing.assert_close(close_mix, distant_mix, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(close_mix, mixed(0.01, alone=True), rtol=1e-2, atol=1e-2)
