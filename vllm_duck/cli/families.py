"""`vllm-duck families`: the models that are served."""

import argparse

from vllm_duck.families import all_families


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "families",
        help="list the models that are served",
        description="List the families of models that are served, and their models. "
        "`vllm-duck plan` says how much memory one takes, from its config.json alone.",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for family in all_families():
        print(f"{family.architecture}: {', '.join(family.models)}")
        print(f"  an indexer {family.rules.indexer.name}; the MTP layer drafts")
    return 0
