"""One engine of each kind, with and without duck_mtp1, for all tests of this folder."""

from collections.abc import Iterator

import pytest

from testing.answers import ask, make_prompts, start
from testing.engines import closing_engines


@pytest.fixture(scope="package")
def engines() -> Iterator[None]:
    with closing_engines():
        yield


@pytest.fixture(scope="package")
def prompts(tiny_model):
    return make_prompts(tiny_model)


# Prompts whose chat has thinking off end in </think>: constrained from the start.
PARSER = {"reasoning_parser": "deepseek_r1"}


@pytest.fixture(scope="package")
def plain(engines, tiny_model):
    return start(tiny_model, speculates=False, **PARSER)


@pytest.fixture(scope="package")
def speculating(tiny_model, plain):
    return start(tiny_model, speculates=True, **PARSER)


@pytest.fixture(scope="package")
def drafting_more(tiny_model, plain):
    # Without statistics: vLLM's are one set for each process.
    return start(
        tiny_model, speculates=True, num_drafts=3, disable_log_stats=True, **PARSER
    )


@pytest.fixture
def same(plain, speculating, drafting_more, prompts):
    """Ask all; returns the answers once they are equal."""

    def check(asked=prompts, **sampling):
        expected = ask(plain, asked, **sampling)
        assert ask(speculating, asked, **sampling) == expected
        assert ask(drafting_more, asked, **sampling) == expected
        return expected

    return check
