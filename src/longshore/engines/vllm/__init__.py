"""vLLM: tiers behind its offloading connector. `spec_module_path` is this module, `spec_name` is `LongshoreSpec`."""

from longshore.engines.vllm.manager import LongshoreManager
from longshore.engines.vllm.spec import LongshoreSpec
from longshore.engines.vllm.worker import LongshoreWorker

__all__ = ["LongshoreManager", "LongshoreSpec", "LongshoreWorker"]
