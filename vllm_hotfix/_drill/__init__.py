"""The parts of ``python -m vllm_hotfix.drill``: what runs in the engine's process, in its workers, and the report."""
