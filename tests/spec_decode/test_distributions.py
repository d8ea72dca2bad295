"""The arithmetic of speculative sampling, at its edges."""

import torch

from vllm_duck.spec_decode.distributions import acceptance_rate, accepts, residual


def _one(value):
    return torch.tensor([value], dtype=torch.float64)


def test_a_draft_that_the_target_cannot_produce_is_rejected_even_at_u_0():
    assert not accepts(_one(0.0), _one(0.0), _one(0.3))


def test_a_draft_is_accepted_while_u_q_is_at_most_p():
    p, q = _one(0.25), _one(0.5)
    assert accepts(_one(0.0), p, q)
    assert accepts(_one(0.5), p, q)
    assert not accepts(_one(0.5 + 1e-12), p, q)


def test_a_draft_less_likely_than_the_target_has_it_is_always_accepted():
    assert accepts(_one(1 - 1e-16), _one(0.5), _one(0.5))


def test_what_is_left_is_normalised():
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.2, 0.4, 0.4]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[1.0, 0.0, 0.0]]))


def test_equal_distributions_leave_the_target_itself():
    p = torch.tensor([[0.5, 0.5, 0.0]])
    torch.testing.assert_close(residual(p, p.clone()), p)


def test_overlap_is_the_chance_of_acceptance():
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.2, 0.4, 0.4]])
    torch.testing.assert_close(acceptance_rate(p, q), torch.tensor([0.7]))
