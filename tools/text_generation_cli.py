"""Generate text with a checkpoint of a training run; only --load is required.

    python tools/text_generation_cli.py --load DIR --prompt "def "
    torchrun --nproc-per-node 2 tools/text_generation_cli.py --load DIR --prompt "def "

With HOST:PORT in place of --load, prompts are sent to a running text-generation server.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.inference.engine_flags import (
    add_engine_flags,
    engine_options,
    generation_layout,
)
from megatron.training.process.exit_report import exit_code
from megatron.training.process.user_code import parse_tool_args

if TYPE_CHECKING:
    from megatron.inference.llm import LLM, Answer


_NUM_TOKENS = 100


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Write text with a checkpoint, or through a server.", allow_abbrev=False
    )
    parser.add_argument("address", nargs="?", help="HOST:PORT of a running server")
    parser.add_argument("--load", help="directory that training saved to, or one checkpoint in it")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; default: the newest")
    parser.add_argument(
        "--spec", nargs=2, metavar=("MODULE", "ATTRIBUTE"), help="layers of your own to import"
    )
    parser.add_argument("--prompt", help="text to continue; default: lines from the terminal")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image that the prompt is about; several: one for each tag <image> of the prompt",
    )
    parser.add_argument(
        "--num-tokens",
        type=int,
        help="tokens to write at most, 100 if not given; with HOST:PORT and prompts from the "
        "terminal, each prompt is followed by the number for it",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--top-k", "--top_k", type=int, default=0, help="0: no limit")
    parser.add_argument("--top-p", "--top_p", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--cache-mla-latents", action="store_true", help="latent attention keeps its narrow vectors"
    )
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    return parser


def main() -> None:
    """Answer --prompt, or each line from the terminal until its end."""
    try:
        args = parse_tool_args(build_parser)
        if (args.load is None) == (args.address is None):
            raise ConfigError("give --load DIR to write here, or HOST:PORT to ask a server")
        if args.image and args.address is not None:
            raise ConfigError(
                f"--image {args.image[0]}: PUT /api of a server reads text only; give --load DIR, "
                "or send images to /v1/chat/completions"
            )
        if args.address is not None:
            _ask_server(args)
            return
        # Torch takes a second to import: only where it is used.
        from megatron.core.inference.sampling_params import SamplingParams
        from megatron.inference import LLM, PromptWithImages

        params = SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            num_tokens_to_generate=_NUM_TOKENS if args.num_tokens is None else args.num_tokens,
            seed=args.seed,
            return_log_probs=args.json,
        )
        with ExitStack() as watch:
            llm = LLM.load(
                args.load,
                step=args.ckpt_step,
                device_kind=args.device,
                flags=_model_flags(args),
                layout=generation_layout(args),
                options=engine_options(args),
                watch=watch,
            )
            texts = _prompts(args)
            prompts = (PromptWithImages(text, args.image) if args.image else text for text in texts)
            for answer in llm.answers(prompts, params):
                print(_shown(answer, args.json, llm), flush=True)
            if llm.engine.stats().num_drafts:
                print(llm.engine.stats().drafts, file=sys.stderr)
        llm.shut_down()
    except (MegatronError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def _shown(answer: Answer, as_json: bool, llm: LLM) -> str:
    """Return the line to print."""
    prompt = getattr(answer.prompt, "text", answer.prompt)  # of a PromptWithImages
    if not as_json:
        is_read_apart = llm.engine.model.decoder_start is not None
        return answer.text if is_read_apart else f"{prompt}{answer.text}"
    ids = [t.token for t in answer.tokens]
    log_probs = [t.log_prob for t in answer.tokens]
    found = {"prompt": prompt, "text": answer.text, "tokens": ids, "log_probs": log_probs}
    return json.dumps(found)


def _model_flags(args: argparse.Namespace) -> dict[str, object]:
    own: dict[str, object] = {"cache_mla_latents": True} if args.cache_mla_latents else {}
    return own if args.spec is None else {**own, "spec": args.spec}


def _prompts(args: argparse.Namespace) -> Iterator[str]:
    if args.prompt is not None:
        yield args.prompt
        return
    while True:
        try:
            prompt = input("Enter prompt: ")
        except EOFError:
            return
        yield prompt


def _ask_server(args: argparse.Namespace) -> None:
    """Print the answer to each prompt; an error ends the program, if --prompt has asked for it."""
    for prompt in _prompts(args):
        num_tokens = args.num_tokens
        if num_tokens is None:
            try:
                num_tokens = _NUM_TOKENS if args.prompt is not None else _read_number()
            except EOFError:
                return
        request = urllib.request.Request(
            f"http://{args.address}/api",
            data=json.dumps(_fields_of_api(args, prompt, num_tokens)).encode(),
            headers={"Content-Type": "application/json"},
            method="PUT",
        )
        try:
            with urllib.request.urlopen(request) as answer:
                print("Megatron Response: ")
                print(json.load(answer)["text"][0], flush=True)
        except urllib.error.HTTPError as error:
            message = _message_of(error)
            if args.prompt is not None:
                raise ConfigError(f"{args.address} answers {error.code}: {message}") from None
            print(f"Error {error.code}: {message}", flush=True)


def _read_number() -> int:
    """Read the number that Megatron-LM's client asks for after each prompt."""
    text = input("Enter number of tokens to generate: ")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"number of tokens {text!r:.80}: give a whole number") from None


def _message_of(error: urllib.error.HTTPError) -> str:
    """Return the message of a server's error, or the text of one that is not ours."""
    text = error.read(10_000).decode(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text


def _fields_of_api(args: argparse.Namespace, prompt: str, num_tokens: int) -> dict[str, object]:
    """Return the body of PUT /api; greedy is top_k 1 there."""
    body: dict[str, object] = {"prompts": [prompt], "tokens_to_generate": num_tokens}
    if args.temperature == 0:
        return {**body, "top_k": 1}
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    seed = {} if args.seed is None else {"random_seed": args.seed}
    return {**body, **sampling, **seed}


if __name__ == "__main__":
    main()
