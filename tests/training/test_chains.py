"""Every generated problem is right: its steps, its answer, and its split."""

import math
import random
import re

import pytest

from training.chains import MAKERS, PRIME_LIMIT, Problem, problems, training_problem


def _make_problems(kind: str, count: int = 300) -> list[Problem]:
    rng = random.Random(5)
    maker, _ = MAKERS[kind]
    return [maker(rng) for _ in range(count)]


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _true_answer(problem: Problem) -> str:
    """Solve the question from its text alone, by the most obvious means."""
    asked = _numbers(problem.question)
    if problem.kind == "add":
        return f"{asked[0]} + {asked[1]} = {sum(asked)}."
    if problem.kind == "gcd":
        return f"The gcd of {asked[0]} and {asked[1]} is {math.gcd(*asked)}."
    if problem.kind == "sort":
        return ", ".join(map(str, sorted(asked))) + "."
    if problem.kind == "count":
        start, stop, step = asked
        return ", ".join(map(str, range(start, stop + 1, step))) + "."
    (number,) = asked
    factors = [factor for factor in range(2, number) if number % factor == 0]
    if not factors:
        return f"Yes, {number} is prime."
    product = f"{number} = {factors[0]} x {number // factors[0]}"
    return f"No, {number} is not prime, because {product}."


@pytest.mark.parametrize("kind", MAKERS)
def test_answer_is_right(kind: str) -> None:
    for problem in _make_problems(kind):
        assert problem.answer == _true_answer(problem)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_equation_in_the_steps_holds(kind: str) -> None:
    for problem in _make_problems(kind):
        text = problem.worked_answer
        for left, right in re.findall(r"([\dx +]+) = ([\dx +]+)", text):
            sides = [eval(side.replace("x", "*")) for side in (left, right)]
            assert sides[0] == sides[1], text


def test_division_steps_leave_a_remainder_below_the_divisor() -> None:
    for problem in _make_problems("gcd") + _make_problems("prime"):
        for step in problem.steps:
            if " + " in step:
                _, divisor, _, remainder = _numbers(step)
                assert remainder < divisor


def test_training_never_draws_a_held_out_problem() -> None:
    rng = random.Random(0)
    assert not any(training_problem(rng).is_held_out for _ in range(3000))


def test_primes_are_a_closed_set_without_held_out_problems() -> None:
    assert len(problems("prime", PRIME_LIMIT, is_held_out=False)) == PRIME_LIMIT - 2
    assert problems("prime", 10, is_held_out=True) == []


@pytest.mark.parametrize("kind", ["add", "gcd", "count", "sort"])
def test_held_out_problems_differ_from_trained_ones(kind: str) -> None:
    trained = {p.question for p in problems(kind, 200, is_held_out=False)}
    held_out = {p.question for p in problems(kind, 200, is_held_out=True)}
    assert len(held_out) >= 30
    assert not trained & held_out
