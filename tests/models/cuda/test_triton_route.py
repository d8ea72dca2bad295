"""The router and the request: the C++ host's choice, one flag behind all of it."""

import pytest
import torch

from testing.gpu.cpp_host import choose_experts
from testing.gpu.numbers import (
    COMPANIES,
    assert_close,
    bits,
    lifted,
    lowered,
    numbers,
    poisoned,
    seeded,
)
from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cuda.kernels.route import (
    Choice,
    Request,
    router_logits,
    send_request,
)
from vllm_duck.models.cuda.kernels.tiles import Tile

OFFICIAL = Choice(8, 4, True, 2.5)
WIDE = Tile(block=256, num_warps=4)


def make_rows(num_rows, hidden):
    x = torch.randn(num_rows, hidden, generator=seeded(num_rows))
    return lifted(x.to(torch.bfloat16))


def make_request(num_rows, hidden, top):
    return Request(
        hidden=poisoned(num_rows, hidden),
        ids=poisoned(num_rows, top, dtype=torch.int32),
        weights=poisoned(num_rows, top, dtype=torch.float32),
        flag=torch.zeros(1, dtype=torch.int64),
        sequence=torch.zeros(1, dtype=torch.int64),
        arrivals=torch.zeros(1, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("num_rows", "experts", "hidden", "parts"),
    [(1, 256, 512, 4), (3, 40, 72, 1), (17, 16, 200, 3)],
)
def test_logits_are_float64_s_of_fp32_weights(num_rows, experts, hidden, parts):
    x = make_rows(num_rows, hidden)
    weight = torch.randn(experts, hidden, generator=seeded(1)) * hidden**-0.5
    out = poisoned(parts, num_rows, experts, dtype=torch.float32)
    router_logits(x, weight, out, tile=WIDE)
    # Weights rounded to bf16 would be a thousand times farther off.
    assert_close(out.double().sum(0), lowered(x) @ weight.double().T, 2e-6)


@pytest.mark.parametrize("company", COMPANIES)
def test_a_row_s_logits_are_its_own(company):
    x, weight = make_rows(company, 200), torch.randn(40, 200, generator=seeded())
    out = poisoned(2, company, 40, dtype=torch.float32)
    alone = poisoned(2, 1, 40, dtype=torch.float32)
    router_logits(x, weight, out, tile=WIDE)
    router_logits(x[-1:].clone(), weight, alone, tile=WIDE)
    assert torch.equal(alone[:, 0], out[:, -1])


CHOICES = {
    "official": (256, 8, OFFICIAL),
    "all groups": (16, 4, Choice(4, 4, True, 1.0)),
    "one group": (24, 5, Choice(1, 1, False, 2.5)),
    "odd": (21, 3, Choice(3, 2, True, 1.5)),
}


def make_logits(kind, num_rows, experts, parts):
    g = seeded(num_rows)
    logits = torch.randn(parts, num_rows, experts, generator=g)
    bias = torch.randn(experts, generator=g) * 0.1
    if kind == "ties":
        return logits.round(), bias.round()
    return logits * (30 if kind == "saturated" else 1), bias


@pytest.mark.parametrize("kind", ["spread", "ties", "saturated"])
@pytest.mark.parametrize("name", CHOICES)
def test_experts_and_weights_are_those_of_the_cpp_host(name, kind):
    experts, top, choice = CHOICES[name]
    x, request = make_rows(3, 200), make_request(3, 200, top)
    logits, bias = make_logits(kind, 3, experts, parts=2)
    send_request(x, logits, bias, choice, request)
    for row in range(3):
        ids, weights = choose_experts(
            logits[0, row] + logits[1, row],
            bias,
            top=top,
            groups=choice.n_group,
            top_groups=choice.topk_group,
            normalised=choice.norm_topk_prob,
            factor=choice.routed_scaling_factor,
        )
        assert torch.equal(request.ids[row], ids)
        assert torch.equal(request.weights[row], weights)


def test_the_request_s_rows_are_plain():
    x, request = make_rows(2, 4100), make_request(2, 4100, 4)
    logits, bias = make_logits("spread", 2, 16, parts=1)
    send_request(x, logits, bias, CHOICES["all groups"][2], request)
    assert torch.equal(numbers(request.hidden), lowered(x))
    assert torch.equal(request.hidden, bits(lowered(x)))


@pytest.mark.parametrize("num_rows", [1, 5])
def test_each_request_raises_the_flag_by_one(num_rows):
    x, request = make_rows(num_rows, 72), make_request(num_rows, 72, 4)
    logits, bias = make_logits("spread", num_rows, 16, parts=1)
    for turn in range(1, 4):
        send_request(x, logits, bias, CHOICES["all groups"][2], request)
        assert request.flag.tolist() == request.sequence.tolist() == [turn]
        assert request.arrivals.tolist() == [0]


def test_other_shapes_are_refused():
    x, request = make_rows(2, 72), make_request(2, 72, 4)
    logits, bias = make_logits("spread", 2, 16, parts=1)
    with pytest.raises(DuckShapeError, match=r"logits must be \[any, 2, 8\]"):
        send_request(x, logits, bias[:8].clone(), OFFICIAL, request)
    with pytest.raises(DuckShapeError, match=r"request.hidden must be \[1, 72\]"):
        send_request(x[:1], logits[:, :1].clone(), bias, OFFICIAL, request)
    with pytest.raises(DuckShapeError, match=r"weight must be \[any, 72\]"):
        router_logits(x, torch.zeros(16, 71), logits)
