"""The sampler's kernels draw the same token as the definition of sampling, always."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from support.sampling import OneMask, random_logits, random_request  # noqa: E402
from twostroke.backends.gpu import sampling  # noqa: E402
from twostroke.backends.gpu.kernels import sampler  # noqa: E402
from twostroke.backends.gpu.launch import interpreted  # noqa: E402
from twostroke.backends.sampling.reference import draw, score  # noqa: E402
from twostroke.backends.sampling.rows import RowTable  # noqa: E402
from twostroke.core.request import Request  # noqa: E402
from twostroke.core.sampling import SamplingParams  # noqa: E402
from twostroke.core.step import NO_TOKEN  # noqa: E402


def sample(rows, logits):
    """Run the kernels on `ROW`s and logits (rows, vocab_size)."""
    sample_input = sampling.sample_rows(rows, -(-logits.shape[1] // 32))
    arrays = [torch.from_numpy(array) for array in (logits, sample_input.rows, sample_input.lists)]
    results = torch.zeros((len(rows), sampling.RESULT_INTS), dtype=torch.int32)
    gpu = interpreted(torch.float32)
    sampler.launch(gpu, *arrays, results, torch.empty_like(arrays[0]))
    if sample_input.reports:
        sampler.report(gpu, arrays[0], arrays[1], results)
    return sampling.read_results(results.numpy(), rows["num_logprobs"].tolist())


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 1500])
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.seeds(1)
def test_every_draw_is_that_of_the_definition(vocab_size: int, seed: int) -> None:
    rng = np.random.default_rng([seed, vocab_size])
    requests = [random_request(rng, vocab_size) for _ in range(24)]
    logits = np.stack([random_logits(rng, vocab_size) for _ in requests])
    unchanged = logits.copy()
    table = RowTable()  # owns what its rows point to
    tokens, logprobs = sample(table.rows(requests), logits)
    np.testing.assert_array_equal(logits, unchanged)
    for request, row, token, reported in zip(requests, logits, tokens, logprobs, strict=True):
        mask = request.matcher.mask if isinstance(request.matcher, OneMask) else None
        right, right_logprobs = draw(request, row, (), mask)
        assert token == right, request.params
        assert (reported is None) == (right_logprobs is None)
        if reported is not None and right_logprobs is not None:
            assert reported.top_ids == right_logprobs.top_ids
            results = [reported.logprob, *reported.top_logprobs]
            expected_logprobs = [right_logprobs.logprob, *right_logprobs.top_logprobs]
            np.testing.assert_allclose(results, expected_logprobs, rtol=1e-6, atol=1e-6)


def test_a_given_token_is_reported_and_nothing_is_drawn() -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((3, 90)).astype(np.float32)
    logits[2] = np.nan
    params = SamplingParams(prompt_logprobs=4, logit_bias={5: 100.0})
    request = Request("r", [1, 2], 2, params, 0)
    table = RowTable()
    rows = table.rows([request] * 3).copy()
    rows["given"], rows["num_logprobs"] = [7, 80, 9], 4
    tokens, reports = sample(rows, logits)
    assert tokens == [7, 80, NO_TOKEN]
    for index, token in enumerate((7, 80)):
        right, reported = score(request, logits[index], token), reports[index]
        assert right is not None
        assert reported is not None
        assert reported.top_ids == right.top_ids
        np.testing.assert_allclose(reported.logprob, right.logprob, rtol=1e-6)
    assert reports[2] is None
