"""The drill's engine, in a process of its own: ``python -m vllm_hotfix._drill.engine FD PLAN``.

It writes a JSON object in a line to the file descriptor for each thing that happens: ``{"ready": ...}``,
``{"round": ...}``, ``{"done": ...}`` or ``{"error": ...}``. It ends when its standard input does: whoever started it
is gone then.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from .report import (
    Difference,
    Digest,
    Digests,
    Round,
    addressed_by,
    as_json,
    compare,
    how_it_ended,
    written_by_a_pass,
)

_EXTENSION: Final = "vllm_hotfix._drill.worker.Extension"
_PROMPTS: Final = (5, 11, 17, 23)  # tokens of each
_NEW: Final = 16
_AGAIN: Final = 10  # runs in which the fresh load's tokens must come if they are other ones
_GRACE: Final = 3  # seconds in which vLLM may say itself that a process of its has ended
_WRITTEN: Final = "a forward pass writes it: if it is scratch, name it with --scratch"


class Refused(Exception):
    """The drill cannot be done; the message is a line for whoever asked."""


class Drill:
    """An engine, and what it was after its fresh load.

    Args:
        plan: ``model``, ``arguments`` (vLLM's, words), ``level`` and ``scratch`` (regular expressions).
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self.level: int = plan["level"]
        self.scratch: list[str] = plan["scratch"]
        self.llm = _start(plan)
        config = self.llm.llm_engine.vllm_config
        self.loader = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
        if self.loader == "dummy":
            raise Refused("load format 'dummy' has no weights that a reload could bring back")
        if config.model_config.runner_type != "generate":
            raise Refused(f"{plan['model']} does not generate text, and the drill compares what is generated")
        vocabulary = config.model_config.get_vocab_size()
        longest = config.model_config.max_model_len - _NEW
        if longest < 1:
            raise Refused(f"--max-model-len must be {_NEW + 1} at least")
        chance = random.Random(0)
        self.prompts = [
            {"prompt_token_ids": [chance.randrange(vocabulary) for _ in range(min(length, longest))]}
            for length in _PROMPTS
        ]
        workers = [json.loads(one) for one in self.llm.collective_rpc("hotfix_state")]
        self.device: str = workers[0]["device"]
        self.patches: list[dict[str, Any]] = workers[0]["patches"]
        self.states = {patch["name"]: patch["state"] for patch in self.patches}
        mode = getattr(config.compilation_config.cudagraph_mode, "name", "NONE")
        self.graphs = self.device == "cuda" and not config.model_config.enforce_eager and mode != "NONE"
        first, _ = self.digests()
        if not all(first):
            raise Refused("a worker has no tensors that could be compared")
        self.tokens = [self.generate() for _ in range(3)]
        self.fresh, self.left_out = self.digests()
        both = list(zip(first, self.fresh, strict=True))
        self.written = [written_by_a_pass(*some) for some in both]
        self.lazy = [later.keys() - earlier.keys() for earlier, later in both]
        self.digest = 0.0

    def digests(self) -> tuple[list[Digests], dict[str, str]]:
        """Each worker's digests, and what was left out, with reasons."""
        workers = [json.loads(one) for one in self.llm.collective_rpc("hotfix_digests", args=(self.scratch,))]
        self.digest = max(worker["seconds"] for worker in workers)
        left_out = {path: why for worker in workers for path, why in worker["scratch"].items()}
        return [{path: Digest(*one) for path, one in worker["tensors"].items()} for worker in workers], left_out

    def generate(self) -> list[list[int]]:
        """Greedy tokens of each prompt, none of them out of an earlier run's cache.

        One prompt at a time: how an engine batches what reaches it is chance, and kernels round by the batch.
        """
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=_NEW, ignore_eos=True, detokenize=False)
        outputs = [self.llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in self.prompts]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def round(self, number: int) -> Round:
        """Lose the weights, reload, and compare with the fresh load."""
        this = Round(number)
        if self.level:
            self.llm.sleep(level=self.level)
            self.llm.wake_up(tags=["weights"])
        else:
            self.llm.collective_rpc("hotfix_poison")
        before, _ = self.digests()
        for fresh, left in zip(self.fresh, before, strict=True):
            if all(left.get(path) == one for path, one in fresh.items()):
                raise Refused("nothing was discarded: whatever the reload does, this worker's tensors are as they were")
        start = time.perf_counter()
        try:
            self.llm.collective_rpc("reload_weights")
        except Exception as error:
            if _is_dead(error):
                raise
            this.error = f"{_line(error)}; {addressed_by(f'{self.loader}: {error}', self.states)}"
        this.reload = time.perf_counter() - start
        if this.error:
            return this
        if self.level:
            self.llm.wake_up(tags=["kv_cache"])
        after, _ = self.digests()
        this.digest = self.digest
        for rank, (fresh, left, now) in enumerate(zip(self.fresh, before, after, strict=True)):
            this.tensors += len(fresh)
            found = compare(fresh, left, now, self.lazy[rank])
            # Equal or not: what a pass writes is not what the load has made.
            found.update(dict.fromkeys(self.written[rank], (_WRITTEN, True)))
            this.differences += [Difference(path, rank, how, values) for path, (how, values) in found.items()]
        self.explain(this)
        this.tokens = self.judge_tokens()
        this.memory = [json.loads(one)["used"] for one in self.llm.collective_rpc("hotfix_state")]
        return this

    def explain(self, this: Round) -> None:
        """Say of each difference what is to be seen of the values, and which patch addresses it."""
        paths = sorted({one.path for one in this.differences if one.values})
        seen = self.llm.collective_rpc("hotfix_describe", args=(paths,)) if paths else []
        words = [json.loads(one) for one in seen]
        for one in this.differences:
            one.patch = addressed_by(f"{self.loader}: {one.path}", self.states)
            if one.values and one.how != _WRITTEN and one.path in words[one.rank]:
                one.how = f"{words[one.rank][one.path]}: {one.how}"

    def judge_tokens(self) -> str:
        """Compare what is generated now with the fresh load's; kernels that vary by themselves are told apart.

        Of weights that are wrong no run gives the fresh load's tokens.
        """
        if any(tokens != self.tokens[0] for tokens in self.tokens):
            return "vary"
        if self.generate() == self.tokens[0]:
            return "equal"
        return "vary" if any(self.generate() == self.tokens[0] for _ in range(_AGAIN)) else "differ"


def _start(plan: dict[str, Any]) -> Any:
    """Start vLLM as ``vllm serve`` would, with the drill's methods in its workers."""
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> None:
        raise Refused(f"vLLM does not take these engine arguments: {message}")

    if any(word.partition("=")[0] == "--model" for word in plan["arguments"]):
        raise Refused("the model is the first argument, not --model")
    parser = FlexibleArgumentParser(prog="drill", add_help=False)
    parser.error = refuse
    parser = EngineArgs.add_cli_args(parser)
    words = ["--model", plan["model"], *plan["arguments"]]
    if plan["level"]:
        words.append("--enable-sleep-mode")
    arguments = vars(parser.parse_args(words))
    if arguments.get("worker_extension_cls"):
        raise Refused("--worker-extension-cls is what the drill itself needs")
    arguments["worker_extension_cls"] = _EXTENSION
    return LLM(**arguments)


def _is_dead(error: Exception) -> bool:
    return type(error).__name__ == "EngineDeadError"


def _line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _follow(stream: Any) -> None:
    """End with whoever holds the other end of a stream, and everything that was started here too."""
    stream.read()
    os.killpg(0, signal.SIGKILL)


def _watch(tell: Callable[[str], None]) -> None:
    """Tell if a process of the engine has ended: a call that waits for its answer may wait for ever."""
    processes = {process.sentinel: process for process in multiprocessing.active_children()}
    for sentinel in multiprocessing.connection.wait(list(processes)) if processes else ():
        ended = processes[int(sentinel)]  # type: ignore[arg-type]
        time.sleep(_GRACE)
        tell(f"{ended.name} ended {how_it_ended(ended.exitcode or 0)}")
        os._exit(1)


def main(descriptor: int, plan: dict[str, Any]) -> None:
    """Carry out a plan and report; whatever goes wrong is reported too."""
    out = os.fdopen(descriptor, "w")
    # A forked engine must not hold it open: that it is closed tells the other side that this process has ended.
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))

    def tell(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threading.Thread(target=_follow, args=(os.fdopen(os.dup(0)),), daemon=True).start()
    number = 0

    def tell_of_end(how: str) -> None:
        tell(error=how, generic=True, round=number)

    try:
        start = time.perf_counter()
        drill = Drill(plan)
        threading.Thread(target=_watch, args=(tell_of_end,), daemon=True).start()
        tell(
            ready={
                "seconds": time.perf_counter() - start,
                "tensors": sum(map(len, drill.fresh)),
                "workers": len(drill.fresh),
                "device": drill.device,
                "graphs": drill.graphs,
                "patches": drill.patches,
                "left_out": drill.left_out,
                "digest": drill.digest,
            }
        )
        for number in range(1, plan["rounds"] + 1):
            this = drill.round(number)
            tell(round=as_json([this])[0])
            if this.error:
                break
        tell(done=True)
    except Refused as error:
        tell(error=str(error))
    except Exception as error:
        import traceback

        traceback.print_exc()
        tell(error=_line(error), generic=True, round=number)


if __name__ == "__main__":
    # The workers' processes import this module too, under another name.
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
