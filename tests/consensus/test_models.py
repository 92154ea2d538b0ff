"""The chunk model: one set of samples, one pure fit, the same chunk everywhere."""

from __future__ import annotations

import logging
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3store.consensus.models import MOST_SAMPLES, MULTIPLE, RESERVE, ChunkModel, fit
from l3store.errors import ConfigError

A, B, C = 2e-9, 3e-5, 4e-3
BASE, PAGE, CONTEXT = 8192, 64, 131072


def measured(count=32, *, a=A, b=B, c=C, noise=0.0, seed=0):
    """Samples as stage 0 takes them: longest chunk first, the first one slow."""
    rng = random.Random(seed)
    lengths = [BASE * (count - i) // count for i in range(count)]
    seconds = [(a * n * n + b * n + c) * (1 + noise * rng.uniform(-1, 1)) for n in lengths]
    return list(zip(lengths, [seconds[0] * 9, *seconds[1:]], strict=True))


def model(samples=None, **sizes):
    sizes = {"base": BASE, "page": PAGE, "context": CONTEXT} | sizes
    return ChunkModel(measured() if samples is None else samples, **sizes)


class TestFit:
    def test_finds_the_curve_behind_exact_samples(self):
        found = fit(measured())
        assert (found.a, found.b, found.c) == pytest.approx((A, B, C), rel=1e-6)

    def test_the_first_sample_pays_for_warming_up(self):
        samples = measured()
        assert fit([(samples[0][0], 99.0), *samples[1:]]) == fit(samples)

    def test_no_other_curve_is_nearer(self):
        samples = measured(noise=0.05)
        best = fit(samples)

        def off(a, b, c):
            return math.fsum((a * n * n + b * n + c - t) ** 2 for n, t in samples[1:])

        for i in range(3):
            for factor in (0.99, 1.01):
                other = list(best)
                other[i] *= factor
                assert off(*other) > off(*best)

    @pytest.mark.parametrize(
        ("samples", "why"),
        [
            (measured(8), "7 samples after the first, at least 8"),
            (measured(a=-A), "does not grow faster"),
            (measured(a=0.0, b=0.0), "does not grow faster"),
            ([(4096, 1.0)] * 20, "do not tell a curve"),
            ([(n, t) for n, t in measured()[:-1]] + [(64, math.nan)], "not finite"),
            ([(n, t) for n, t in measured()[:-1]] + [(0, 1.0)], "not finite and positive"),
        ],
    )
    def test_what_cannot_be_fitted_is_refused(self, samples, why):
        with pytest.raises(ValueError, match=why):
            fit(samples)


class TestLength:
    def test_without_a_history_it_is_the_base(self):
        assert model().length(0) == BASE

    @pytest.mark.parametrize("history", [1000, 16384, 65536, 100000])
    def test_it_goes_three_quarters_of_the_way_to_equal_latency(self, history):
        """Against a solution by halving, which shares nothing with the formula."""
        target, low, high = A * BASE**2 + B * BASE, 0.0, float(BASE)
        for _ in range(200):
            x = (low + high) / 2
            took = A * ((history + x) ** 2 - history**2) + B * x
            low, high = (x, high) if took < target else (low, x)
        wanted = BASE + 0.75 * (low - BASE)
        assert 0 <= wanted - model().length(history) < MULTIPLE + 1e-3

    def test_a_longer_history_never_makes_it_longer(self):
        lengths = [model().length(history) for history in range(0, CONTEXT - BASE - RESERVE, 997)]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[-1] < lengths[0]

    def test_never_below_a_quarter_of_the_base(self):
        steep = model(measured(a=1e-4, b=1e-9), context=10**7)
        assert steep.length(5 * 10**6) == BASE // 4

    def test_never_into_the_end_of_the_context(self):
        left = 1000
        chunk = model().length(CONTEXT - left)
        assert chunk == (left - RESERVE) // MULTIPLE * MULTIPLE

    @pytest.mark.parametrize("left", [0, 1, RESERVE, RESERVE + MULTIPLE - 1])
    def test_less_than_one_multiple_is_the_base(self, left):
        assert model().length(CONTEXT - left) == BASE

    @given(
        history=st.integers(0, CONTEXT), page=st.sampled_from([1, 16, 64, 128, 1024]),
        seed=st.integers(0, 99),
    )  # fmt: skip
    def test_the_rails_hold_for_any_history(self, history, page, seed):
        chunk = model(measured(noise=0.3, seed=seed), page=page).length(history)
        if chunk != BASE:
            multiple = max(page, MULTIPLE)
            assert chunk % multiple == 0
            assert chunk >= min(BASE // 4, CONTEXT - history - RESERVE) - multiple
            assert history + chunk + RESERVE <= CONTEXT


class TestAgreement:
    @given(seed=st.integers(0, 1000), history=st.integers(0, CONTEXT))
    def test_the_same_samples_give_the_same_chunk_on_every_rank(self, seed, history):
        samples = measured(noise=0.2, seed=seed)
        ranks = [model(list(samples)) for _ in range(4)]
        assert len({rank.curve for rank in ranks}) == 1
        assert len({rank.length(history) for rank in ranks}) == 1

    def test_ranks_that_fit_their_own_timings_diverge(self):
        """What the leader's samples are given to all for."""
        ranks = [model(measured(noise=0.02, seed=seed)) for seed in range(4)]
        chunks = {tuple(rank.length(h) for h in range(0, CONTEXT, 4096)) for rank in ranks}
        assert len(chunks) > 1


class TestRefusals:
    def test_samples_that_cannot_be_fitted_mean_the_base_and_one_warning(self, caplog):
        with caplog.at_level(logging.WARNING):
            flat = model(measured(8))
            assert [flat.length(history) for history in (0, 50000, CONTEXT)] == [BASE] * 3
        assert [record.getMessage() for record in caplog.records] == [
            f"dynamic chunking stays at {BASE} tokens a chunk: "
            "7 samples after the first, at least 8"
        ]

    @pytest.mark.parametrize("name", ["base", "page", "context"])
    def test_sizes_are_positive(self, name):
        with pytest.raises(ConfigError, match=f"{name} must be positive, not 0"):
            model(**{name: 0})

    def test_too_many_samples(self):
        with pytest.raises(ConfigError, match="129 samples, at most 128"):
            model(measured(MOST_SAMPLES + 1))

    def test_a_negative_history(self):
        with pytest.raises(ValueError, match="-1 tokens"):
            model().length(-1)
