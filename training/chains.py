"""Closed sets of small problems, each with a chain of steps and its answer.

The sets are small enough that a tiny model can get them right. One problem in
sixteen is held out of training by a hash of its question; primes are the exception,
because the steps for one number teach little about another: all of them are trained.
"""

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from training.tokenizer import Turn

HELD_OUT_ONE_IN = 16
PRIME_LIMIT = 100
GCD_LIMIT = 30
SMALL_PRIMES = (2, 3, 5, 7, 11)
COUNTING_STEPS = (1, 2, 3, 4, 5, 10)


@dataclass(frozen=True)
class Problem:
    kind: str
    question: str
    steps: tuple[str, ...]
    answer: str

    @property
    def reasoning(self) -> str:
        return "\n".join(self.steps)

    @property
    def worked_answer(self) -> str:
        """The reply outside thinking mode: the same steps, then the answer."""
        return f"{self.reasoning}\n{self.answer}"

    def turn(self, *, thinking: bool) -> Turn:
        if thinking:
            return Turn(self.question, self.answer, self.reasoning)
        return Turn(self.question, self.worked_answer)

    @property
    def is_held_out(self) -> bool:
        digest = zlib.crc32(self.question.encode())
        return self.kind != "prime" and digest % HELD_OUT_ONE_IN == 0


def addition(rng: random.Random) -> Problem:
    """Two two-digit numbers, digit by digit with the carry."""
    left, right = rng.randrange(10, 100), rng.randrange(10, 100)
    steps, carry = ["Add the digits from right to left."], 0
    for a, b in zip(reversed(str(left)), reversed(str(right)), strict=True):
        total = int(a) + int(b) + carry
        line = f"{a} + {b} + {carry} = {total}, write {total % 10}, "
        carry = total // 10
        steps.append(line + f"carry {carry}.")
    question = f"What is {left} + {right}?"
    return Problem("add", question, tuple(steps), f"{left} + {right} = {left + right}.")


def primality(rng: random.Random) -> Problem:
    """Trial division of a number below 100 by the primes up to its root."""
    number = rng.randrange(2, PRIME_LIMIT)
    steps, factor = ["Divide by the small primes."], None
    for prime in SMALL_PRIMES:
        if prime * prime > number:
            steps.append(f"{prime} x {prime} = {prime**2} is more than {number}.")
            break
        steps.append(_division(number, prime))
        if number % prime == 0:
            factor = prime
            break
    if factor is None:
        answer = f"Yes, {number} is prime."
    else:
        product = f"{number} = {factor} x {number // factor}"
        answer = f"No, {number} is not prime, because {product}."
    return Problem("prime", f"Is {number} prime?", tuple(steps), answer)


def divisor(rng: random.Random) -> Problem:
    """The greatest common divisor of two numbers up to 30, after Euclid."""
    left, right = (rng.randint(2, GCD_LIMIT) for _ in range(2))
    steps = ["Use the algorithm of Euclid."]
    larger, smaller = left, right
    while smaller:
        steps.append(_division(larger, smaller))
        larger, smaller = smaller, larger % smaller
    question = f"What is the gcd of {left} and {right}?"
    answer = f"The gcd of {left} and {right} is {math.gcd(left, right)}."
    return Problem("gcd", question, tuple(steps), answer)


def counting(rng: random.Random) -> Problem:
    """Count in equal steps from one number to another."""
    start, step = rng.randrange(1, 31), rng.choice(COUNTING_STEPS)
    numbers = [start + step * index for index in range(rng.randrange(4, 8))]
    steps = [f"Add {step} each time."]
    steps += [f"{number} + {step} = {number + step}." for number in numbers[:-1]]
    question = f"Count from {start} to {numbers[-1]} in steps of {step}."
    return Problem("count", question, tuple(steps), _listing(numbers))


def sorting(rng: random.Random) -> Problem:
    """Sort four different digits by looking for each digit in turn."""
    digits = rng.sample(range(1, 10), 4)
    steps = ["Look for each digit."]
    steps += [f"{n}: {'yes' if n in digits else 'no'}." for n in range(1, 10)]
    question = f"Sort these digits: {_listing(digits)}"
    return Problem("sort", question, tuple(steps), _listing(sorted(digits)))


# Kind, maker and how often training meets it: the harder, the more often.
MAKERS: dict[str, tuple[Callable[[random.Random], Problem], int]] = {
    "add": (addition, 3),
    "prime": (primality, 3),
    "gcd": (divisor, 4),
    "count": (counting, 2),
    "sort": (sorting, 2),
}


# What a second round needs: kinds that the first one leaves behind.
HARD_WEIGHTS = {"add": 2, "prime": 2, "gcd": 5, "count": 4, "sort": 2}


def training_problem(rng: random.Random, *, is_hard: bool = False) -> Problem:
    """Draw a problem of any kind that is not held out."""
    makers, weights = zip(*MAKERS.values(), strict=True)
    if is_hard:
        weights = tuple(HARD_WEIGHTS[kind] for kind in MAKERS)
    while True:
        problem = rng.choices(makers, weights)[0](rng)
        if not problem.is_held_out:
            return problem


def problems(
    kind: str, count: int, *, is_held_out: bool, seed: int = 0
) -> list[Problem]:
    """Draw up to count distinct problems of one kind from one side of the split."""
    rng = random.Random(f"{kind}-{is_held_out}-{seed}")
    maker, _ = MAKERS[kind]
    found: dict[str, Problem] = {}
    for _ in range(200 * count):
        problem = maker(rng)
        if problem.is_held_out == is_held_out:
            found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


def _division(number: int, by: int) -> str:
    return f"{number} = {by} x {number // by} + {number % by}."


def _listing(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) + "."
