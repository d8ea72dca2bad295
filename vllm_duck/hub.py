"""Models of the Hugging Face hub: fetched once, as the user's options say."""

from pathlib import Path

from vllm import envs
from vllm.engine.arg_utils import EngineArgs

from vllm_duck.errors import DuckConfigError


def local_model(args: EngineArgs) -> str:
    """The model's directory; a model that is not local is fetched.

    Raises:
        DuckConfigError: it cannot be.
    """
    if Path(args.model).is_dir():
        return args.model
    if envs.VLLM_USE_MODELSCOPE:
        raise DuckConfigError(
            f"duck fetches models from the Hugging Face hub alone, got {args.model!r} "
            "and VLLM_USE_MODELSCOPE; fetch it and name its directory"
        )
    from huggingface_hub import snapshot_download

    try:
        path: str = snapshot_download(
            args.model,
            revision=args.revision,
            cache_dir=args.download_dir,
            token=args.hf_token,
            ignore_patterns=args.ignore_patterns,
        )
    # What the hub's client raises for a bad name, a closed door and no network.
    except (OSError, ValueError) as error:
        raise DuckConfigError(
            f"the model must be a directory or a model of the Hugging Face hub, got "
            f"{args.model!r}: {error}"
        ) from error
    return path
