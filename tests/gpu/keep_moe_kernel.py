"""Show that CUDA graphs give the tokens of a cold load after every reload with keep_moe_kernel, and not without.

    python tests/gpu/keep_moe_kernel.py MODEL OTHER [moe=cutlass ...]

MODEL and OTHER are two checkpoints of one shape. Three engines start with CUDA graphs on: OTHER loaded cold, which says
what its tokens and tensors are; MODEL with stock vLLM; MODEL with the patch. Those two sleep at level 2, wake and
reload ten times, OTHER and MODEL in turn; after each they generate greedily, and every parameter of the MoE layers and
every tensor of the kernels that the graphs captured is digested. Then the patched one reloads MODEL out of memory
thirty times, with the patch undone in every second reload, to compare the times. `moe` is the engine's moe_backend.

Exits 1 unless stock's tokens are wrong after every reload, the patched ones are those of the cold load of the same
checkpoint in ten rounds of ten, and so are its tensors, device memory is after the tenth reload what it was after the
second, and a reload takes at most 5 % longer. With Marlin's kernels tokens vary by themselves: look at the tensors.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import sides

ROUNDS = 10
TIMED = 15
GATE = "VLLM_HOTFIX_KEEP_MOE_KERNEL"


def child(side: str, models: list[str], options: dict[str, str]) -> dict[str, Any]:
    """One engine: its tokens after the start and after each reload, device memory, times."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.model_executor.model_loader import get_model_loader

    import vllm_hotfix
    from vllm_hotfix._patches import keep_moe_kernel

    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from _streaming import digest

    llm = LLM(
        model=models[0],
        load_format="safetensors",
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.7,
        seed=0,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
        **({"moe_backend": options["moe"]} if "moe" in options else {}),
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=[1, 5, 9, 13, 17 + i]) for i in range(3)]
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def generate() -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, sampling, use_tqdm=False)]

    def reload(**weights: Any) -> float:
        """Sleep at level 2, wake, reload; return the seconds of the reload alone."""
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        llm.collective_rpc("reload_weights", kwargs=weights)
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        llm.wake_up(tags=["kv_cache"])
        return took

    def digests() -> dict[str, str]:
        """Digest every parameter of MoE layers, and every tensor of the kernels that the graphs captured."""
        tensors = {f"{name}.{key}": one for name, layer in layers for key, one in layer._parameters.items()}
        stack = [(f"kernel {number}", kernel) for number, kernel in enumerate(kernels)]
        while stack:
            path, one = stack.pop()
            if isinstance(one, torch.Tensor):
                tensors[path] = one
            elif keep_moe_kernel._is_of_the_kernel(one):
                stack += [(f"{path}.{key}", part) for key, part in keep_moe_kernel._parts(one).items()]
        return {name: digest(tensor) for name, tensor in tensors.items()}

    layers = [(name, one) for name, one in runner.get_model().named_modules() if hasattr(one, "w13_weight")]
    kernels = [layer.quant_method.moe_kernel for _, layer in layers]
    fresh = generate()
    found: dict[str, Any] = {"tokens": [fresh], "digests": [digests()], "memory": []}
    found["deterministic"] = generate() == fresh
    found["methods"] = sorted({type(layer.quant_method).__name__ for _, layer in layers})
    found["experts"] = sorted({type(kernel.fused_experts).__name__ for kernel in kernels})
    found["layers"] = len(kernels)
    for number in range(ROUNDS if side != "cold" else 0):
        reload(weights_path=models[(number + 1) % 2])
        found["tokens"].append(generate())
        found["digests"].append(digests())
        torch.cuda.synchronize()
        found["memory"].append([torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]])
    found["counters"] = vllm_hotfix.counters().get("keep_moe_kernel", {})
    if side == "patched":
        runner.model_config.model = models[0]
        loader = get_model_loader(runner.load_config)
        memory = [(name, one.clone()) for name, one in loader.get_all_weights(runner.model_config, runner.get_model())]
        found["seconds"] = {"stock": [], "patched": []}
        for _ in range(TIMED):
            vllm_hotfix.deactivate()
            found["seconds"]["stock"].append(reload(weights_iterator=iter(memory)))
            vllm_hotfix.activate()
            found["seconds"]["patched"].append(reload(weights_iterator=iter(memory)))
    return found


def share(tokens: list[list[int]], others: list[list[int]]) -> float:
    """Return how much of what was generated is equal, place by place."""
    pairs = [pair for one, other in zip(tokens, others, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


def main(models: list[str], options: list[str]) -> int:
    """Run the engines and compare them."""
    order = {"cold": models[::-1], "stock": models, "patched": models}
    found = {side: sides.run(__file__, GATE, side, [*some, *options]) for side, some in order.items()}
    stock, patched = found["stock"], found["patched"]
    cold = [stock["tokens"][0], found["cold"]["tokens"][0]]
    right = {
        side: [tokens == cold[number % 2] for number, tokens in enumerate(found[side]["tokens"])][1:]
        for side in ("stock", "patched")
    }
    tensors = [stock["digests"][0], found["cold"]["digests"][0]]
    differ = {
        side: [
            sorted(name for name, one in digests.items() if one != tensors[number % 2][name])
            for number, digests in enumerate(found[side]["digests"])
        ][1:]
        for side in ("stock", "patched")
    }
    print(f"{stock['layers']} layers of {', '.join(stock['methods'])} with {', '.join(stock['experts'])}")
    for side in ("stock", "patched"):
        some = differ[side][-1]
        print(f"{side}: of {len(tensors[0])} tensors differ by round: {list(map(len, differ[side]))}, last {some}")
        memory = [[round(value / 2**20, 3) for value in pair] for pair in found[side]["memory"]]
        print(f"{side}: tokens of a cold load in {sum(right[side])} rounds of {ROUNDS}: {right[side]}")
        shares = [share(tokens, cold[number % 2]) for number, tokens in enumerate(found[side]["tokens"])][1:]
        print(f"{side}: share of equal tokens by round: {[round(one, 2) for one in shares]}")
        print(f"{side}: MiB allocated and free after each reload: {memory}")
    print(f"patched counters after {ROUNDS} reloads: {patched['counters']}")
    seconds = {side: statistics.median(times) for side, times in patched["seconds"].items()}
    ratio = seconds["patched"] / seconds["stock"]
    print(f"seconds of a reload, median of {TIMED} in turn: {seconds}, ratio {ratio:.3f}")
    print(f"all: {patched['seconds']}")
    checks = {
        "tokens are deterministic": all(one["deterministic"] for one in found.values()),
        "the two checkpoints have other tokens": cold[0] != cold[1],
        "first loads are equal": stock["tokens"][0] == patched["tokens"][0],
        "stock is wrong after every reload": not any(right["stock"]),
        "patched is right after every reload": all(right["patched"]),
        "patched tensors are those of a cold load": not any(differ["patched"]),
        "kernels were kept": patched["counters"].get("kernels_kept") == ROUNDS * patched["layers"],
        "nothing was rebound or replaced": not {"tensors_rebound", "kernels_replaced"} & patched["counters"].keys(),
        "reloads leave memory where it was": patched["memory"][1] == patched["memory"][-1],
        "a reload takes at most 5 % longer": ratio <= 1.05,
    }
    return sides.show(checks)


if __name__ == "__main__":
    sides.start(child, main, models=2)
