"""One engine of vLLM in a process of its own: python serving.py ORDERS, where ORDERS is a file of JSON.

{"model": DIRECTORY, "extra": {...}, "blocks": 64, "steps": [["ask", [TOKENS]], ["reset"], ["flip"], ...]}

With "rewritten" weights are changed in their file between vLLM's look at it and ours.
With "plain" instead of "extra" the engine has `PlainSpec`, with neither no connector.

Prints one line of JSON, the last: what each step gave, and the counters of the tiers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from residents import residents_of

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "MKL_CBWR": "COMPATIBLE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
MARK = "SERVED "


class Engine:
    """vLLM with the tiers that `orders` ask for, or without any."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.refused = 0
        self.model = orders["model"]
        options = dict(orders.get("options", {}))
        if orders.get("plain") is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "PlainSpec",
                    "spec_module_path": "plain_spec",
                    **orders["plain"],
                },
            }
        if orders.get("extra") is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                **orders.get("connector", {}),
                "kv_connector_extra_config": {
                    "spec_name": "LongshoreSpec",
                    "spec_module_path": "longshore.engines.vllm",
                    **orders["extra"],
                },
            }
        if "kv_events_config" in options:
            from vllm.config.kv_events import KVEventsConfig

            options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
        if orders.get("rewritten"):
            rewrite_after_loading(Path(self.model))
        self.llm = LLM(
            model=orders["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=orders.get("dtype", "float32"),
            block_size=orders.get("block_size", 32),
            num_gpu_blocks_override=orders["blocks"],
            max_model_len=1024,
            max_num_seqs=8,
            enable_prefix_caching=True,
            **options,
        )
        self.sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=4, detokenize=False, ignore_eos=True)

    def ask(self, tokens: list[int], adapter: str = "", hints: dict[str, Any] | None = None) -> dict[str, Any]:
        """Answer one prompt alone, with the adapter in this directory, if one is named, and with these hints."""
        lora, sampling = self._adapter(adapter) if adapter else None, self.sampling.clone()
        if hints is not None:
            sampling.extra_args = {"kv_transfer_params": {"longshore": hints}}
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False, lora_request=lora)
        return self._said(output)

    def ask_peer(self, tokens: list[int], port: int, host: str = "127.0.0.1") -> dict[str, Any]:
        """Answer one prompt, whose blocks another engine has; and how long that took."""
        sampling = self.sampling.clone()
        sampling.extra_args = {"kv_transfer_params": {"remote_kv_source": {"host": host, "port": port}}}
        begun = time.monotonic()
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return {**self._said(output), "seconds": time.monotonic() - begun}

    def touch(self, path: str) -> None:
        """Tell another process that we are here."""
        Path(path).touch()

    def wait_for(self, path: str) -> None:
        """Wait for another process that tells so."""
        give_up = time.monotonic() + 300.0
        while not Path(path).exists():
            if time.monotonic() > give_up:
                raise RuntimeError(f"{path} was not touched")
            time.sleep(0.01)

    def slow_down(self, seconds: float, path: str, steps: int = 0) -> None:
        """From now on each step takes `seconds` more; `path` is touched after the first; it dies after `steps`."""
        core = self.llm.llm_engine.engine_core.engine_core
        step, taken = core.step_fn, [0]

        def slow() -> Any:
            answer = step()
            taken[0] += 1
            Path(path).touch()
            if taken[0] == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)
            return answer

        core.step_fn = slow

    def ask_together(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Answer several prompts at once."""
        asked = [{"prompt_token_ids": tokens} for tokens in prompts]
        return [self._said(output) for output in self.llm.generate(asked, self.sampling, use_tqdm=False)]

    def abort(self, tokens: list[int], steps: int) -> None:
        """Ask a prompt, and abort it after so many steps."""
        engine = self.llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": tokens}, self.sampling)
        for _ in range(steps):
            engine.step()
        engine.abort_request(["aborted"])

    @staticmethod
    def _said(output: Any) -> dict[str, Any]:
        answer = output.outputs[0]
        return {
            "tokens": list(answer.token_ids),
            "logprobs": [sorted((token, each.logprob) for token, each in step.items()) for step in answer.logprobs],
            "cached": output.num_cached_tokens,
        }

    def reset(self) -> None:
        """Forget what the device has."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset")

    def kill_rank(self, tokens: list[int], what: str) -> dict[str, Any]:
        """Ask a prompt, and kill the second rank while it is stored, or loaded, in parts: the engine has to notice."""
        engine, core, loads = (
            self.llm.llm_engine,
            self.llm.llm_engine.engine_core.engine_core,
            self.manager._load_jobs._by_request,
        )
        is_midway = {
            "store": lambda: bool(self.manager._store_jobs.keys_without_slots),
            "load": lambda: any(load.pending for load in loads.values()),
        }
        engine.add_request("killed", {"prompt_token_ids": tokens}, self.sampling)
        deadline = time.monotonic() + 60.0
        while not is_midway[what]():
            engine.step()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} was seen in parts")
        os.kill(core.model_executor.workers[1].proc.pid, signal.SIGKILL)
        try:
            while time.monotonic() < deadline:
                engine.step()
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises
            return {"died": type(error).__name__}
        raise RuntimeError("the engine has not noticed that a rank died")

    def reset_tiers(self) -> None:
        """Forget what the tiers have, and the device."""
        if not self.llm.llm_engine.reset_prefix_cache(reset_connector=True):
            raise RuntimeError("the prefix cache was not reset")

    def sleep(self, level: int) -> None:
        """Put the engine to sleep."""
        self.llm.sleep(level=level)

    def lose_device(self) -> None:
        """Overwrite the blocks of the device, which vLLM's CPU backend keeps during a sleep, and a GPU does not."""
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        for cache in runner.kv_caches:
            cache.fill_(7.0)

    def wake(self) -> None:
        """Wake the engine up."""
        self.llm.wake_up()

    def settle(self) -> None:
        """Wait until all that was stored is safe in every tier; the engine steps meanwhile, as it does in a server."""
        core, deadline = self.llm.llm_engine.engine_core.engine_core, time.monotonic() + 600.0
        while core.scheduler.connector.has_pending_push_work():
            core.step_fn()
            if time.monotonic() > deadline:
                raise RuntimeError("not all that is to be stored was stored")
        self.manager._runtime.flush(120.0)

    def drop_host(self) -> None:
        """Evict all that the host tier has, so that the file tier must serve."""
        self.settle()
        with self.manager._runtime.batch() as cache:
            keys = {resident.key for resident in residents_of(cache) if resident.slot.tier == "host"}
            if cache.discard(sorted(keys), "host") != len(keys):
                raise RuntimeError("not all could be evicted")

    def evict_all(self) -> None:
        """Evict all that nothing holds from every tier."""
        with self.manager._runtime.batch() as cache:
            for tier in cache.stats():
                cache.evict(tier.name, 1 << 20)

    def lose(self, tier: str) -> None:
        """Evict all that `tier` has."""
        self.settle()
        with self.manager._runtime.batch() as cache:
            while cache.discard([each.key for each in residents_of(cache) if each.slot.tier == tier], tier):
                pass  # heads have to wait for their tails

    def empty(self, directory: str) -> None:
        """Delete all files of a store, which evicts them like this."""
        for path in Path(directory).rglob("*"):
            if path.is_file():
                path.unlink()

    def residents(self) -> dict[str, Any]:
        """What each own tier has, as KV events name it: by the end of the hash, before four bytes of the group."""
        self.settle()
        with self.manager._runtime.batch() as cache:
            found: dict[str, Any] = {tier.name: [] for tier in cache.stats()}
            for each in residents_of(cache):
                found[each.slot.tier].append(int.from_bytes(each.key[-12:-4], "big"))
        return found

    def kill_tier_host(self) -> None:
        """Stop the process that reads files, and kill it a little later: while it reads, if anything is to be read.

        There is no other one until `revive_tier_host`.
        """
        watch = self.file._supervisor
        watch._pause = 1e9
        os.kill(watch.process.pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (watch.process.pid, signal.SIGKILL)).start()

    def revive_tier_host(self) -> None:
        """Have another tier host started, once the first one has died, and wait for it."""
        runtime = self.manager._runtime
        if not runtime._wait(lambda: self.file._supervisor.deaths, 30.0):
            raise RuntimeError("the tier host lives")
        self.file._supervisor._restart_at = 0.0
        if not runtime._wait(lambda: self.file._is_open, 60.0):
            raise RuntimeError("there is no other tier host")

    def ctl(self, command: str, tokens: list[int] | None = None) -> dict[str, Any]:
        """Send the engine a command over its socket."""
        from longshore.runtime.control import ask

        request = {"command": command} | ({} if tokens is None else {"tokens": tokens})
        return ask(self.manager.ctl_server.path, request, 60.0)

    def ctl_while_asking(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Answer prompts while another thread pins, looks up and clears, again and again."""
        over, rounds = threading.Event(), [0]

        def commands() -> None:
            while not over.is_set() or not rounds[0]:
                for command in ("pin", "lookup", "unpin"):
                    self.ctl(command, prompts[0])
                self.ctl("stats")
                self.ctl("clear")
                rounds[0] += 1

        thread = threading.Thread(target=commands)
        thread.start()
        try:
            answers = []
            for _ in range(3):
                answers = self.ask_together(prompts)
                self.reset()
        finally:
            over.set()
            thread.join()
        return answers

    def learn_that_files_are_slow(self) -> None:
        """The gate has seen that a MiB takes a quarter of an hour to read, and next to no time onto the device."""
        from longshore.boundary import DEVICE, FILE, HOST, Route, Status, TransferResult

        for route, seconds in ((Route(FILE, HOST), 1000.0), (Route(HOST, DEVICE), 1e-6)):
            self.manager._runtime.observe_loads(route, [TransferResult(0, (Status.OK,), 1 << 20, seconds)])

    def _adapter(self, path: str, **more: Any) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, path, **more)

    def save_adapter(self, path: str, seed: int) -> None:
        """Write an adapter, over one that may be there, and wait until a change of it would show."""
        from longshore.engines.weight_files import SETTLED

        save_adapter(Path(path), seed)
        while time.time() <= max(file.stat().st_ctime for file in Path(path).iterdir()) + SETTLED:
            time.sleep(0.1)

    def load_adapter(self, path: str) -> None:
        """Have vLLM load what is in the adapter's directory now."""
        self.llm.llm_engine.add_lora(self._adapter(path, load_inplace=True))

    def rewrite_weights(self) -> None:
        """Change some weights in the files of the model, in place."""
        (path,) = Path(self.model).glob("*.safetensors")
        rewrite(path)

    def reload_weights(self) -> None:
        """Have vLLM take the weights that its files have now."""
        self.llm.collective_rpc("reload_weights")

    def scale_weights(self, factor: float) -> None:
        """Change weights behind vLLM's back: those that it does not pack elsewhere on the CPU."""
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        for name, parameter in runner.get_model().named_parameters():
            if "input_layernorm" in name:
                parameter.data.mul_(factor)

    def refuse_loads(self) -> None:
        """From now on nothing can be copied onto the device."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from longshore.boundary import DEVICE
        from longshore.errors import QueueFullError

        worker = get_kv_transfer_group().connector_worker.worker
        submit = worker.engine.submit

        def refuse(transfer: Any) -> None:
            if transfer.route.destination == DEVICE:
                self.refused += 1
                raise QueueFullError("refused by the test")
            submit(transfer)

        worker.engine.submit = refuse

    def damage(self) -> None:
        """Make a cycle of the host tier's eviction order, which loses a chunk, between two requests."""
        with self.manager._runtime.locked() as cache:
            policy = cache._state.policies[0]
            node = next(iter(policy.order()))
            policy._linked.after[node] = node
            policy.remove(node)  # it stays linked

    def flip(self) -> None:
        """Change one bit in each page of the host tier."""
        self.settle()
        self.manager._tiers.arena.array[3::4096] ^= 64

    @property
    def file(self) -> Any:
        """The file tier."""
        (file,) = self.manager._runtime._tiers
        return file

    @property
    def manager(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager

    def counters(self) -> dict[str, Any]:
        """What the tiers have counted."""
        manager = self.manager
        with manager._runtime.locked() as cache:
            if manager._runtime.fault is None:
                cache.check_integrity()
            counters = cache.counters
            return {
                "hits": dict(counters.hits),
                "misses": {reason.value: count for reason, count in counters.misses.items()},
                "lost": dict(counters.lost),
                "drops": {to: {why.value: n for why, n in each.items() if n} for to, each in counters.drops.items()},
                "failed": {route: totals.failed for route, totals in counters.routes.items()},
                "failures": {each.name: dict(each.failures) for each in manager._runtime._tiers},
                "arrived": {route: totals.chunks for route, totals in counters.routes.items()},
                "held": cache.leases + cache.protected,
                "image_bytes": [each.image_bytes for each in cache.stats()[0].sizes],
                "refused": self.refused,
                "faults": manager._runtime.faults,
                "recomputed": 0 if manager._runtime.gate is None else manager._runtime.gate.recomputed,
            }


def save_adapter(path: Path, seed: int) -> None:
    """An adapter for the tiny Llama; of any seed as long as of any other."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    tensors = {}
    for layer in range(3):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{where}.lora_A.weight"] = torch.randn(8, 128, generator=generator)
            tensors[f"{where}.lora_B.weight"] = torch.randn(width, 8, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")


def rewrite(path: Path) -> None:
    """Swap the keys' projections of the first and the last layer in a file of weights; neither size nor ends change."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = sorted(name for name in file.keys() if name.endswith("k_proj.weight"))  # noqa: SIM118
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    (a, b), (c, d) = (header[name]["data_offsets"] for name in (names[0], names[-1]))
    base = 8 + length
    one, other = content[base + a : base + b], content[base + c : base + d]
    with path.open("r+b") as written:
        for at, part in ((base + a, other), (base + c, one)):
            written.seek(at)
            written.write(part)


def rewrite_after_loading(model: Path) -> None:
    """Have weights changed in their file when vLLM has loaded them, before the adapter has looked at them."""
    from longshore.engines.vllm import spec

    describe, (path,) = spec.model_identity, model.glob("*.safetensors")

    def late(*arguments: Any) -> Any:
        rewrite(path)
        return describe(*arguments)

    spec.model_identity = late


def main(make: type[Engine] = Engine) -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    os.environ |= orders.get("environment", {})
    engine = make(orders)
    results = []
    for step, *arguments in orders["steps"]:
        results.append(getattr(engine, step)(*arguments))
    counters = engine.counters() if orders.get("extra") is not None else None
    engine.llm.llm_engine.engine_core.shutdown()
    print(MARK + json.dumps({"results": results, "counters": counters}), flush=True)


if __name__ == "__main__":
    main()
