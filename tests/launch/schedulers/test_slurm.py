"""sbatch's own words, as errors that say what to do; texts as Slurm 22.05 prints them."""

import pytest

from hpclm.base.errors import ConfigError, HpclmError
from hpclm.launch.schedulers.slurm import refused

NOT_CONFIGURED = """sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize(
    "said, kind, answer",
    [
        (NOT_CONFIGURED, ConfigError, "no cluster is configured: set SLURM_CONF, or give --cluster local"),
        (
            "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed\n",
            ConfigError,
            "Slurm refuses the job: invalid partition specified: x; Batch job submission failed",
        ),
        (
            "allocation failure: Unable to contact slurm controller (connect failure)\n",
            HpclmError,
            "repeat the command",
        ),
        ("sbatch: error: Invalid generic resource (gres) specification\n", ConfigError, "engine.device=cpu"),
        ("Requested node configuration is not available\n", ConfigError, "--gpus counts those of each node"),
        ("", ConfigError, "sbatch failed without a message"),
    ],
)
def test_what_sbatch_says_becomes_an_error_that_says_what_to_do(said, kind, answer):
    error = refused(said)
    assert type(error) is kind and answer in str(error) and "sbatch:" not in str(error)
