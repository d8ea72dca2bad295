"""Arguments of an engine that is configured, not started."""

from vllm.engine.arg_utils import EngineArgs


def make_args(model, duck=(), additional_config=(), **changes):
    additional = {} if duck is None else {"duck": {} if duck == () else duck}
    return EngineArgs(
        model=str(model),
        additional_config={**additional, **dict(additional_config)},
        **{"max_model_len": 512, **changes},
    )
