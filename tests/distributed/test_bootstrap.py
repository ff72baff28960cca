import pytest

from hpclm.base.errors import ConfigError
from hpclm.distributed.bootstrap import World, detect

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu07",
}
STORE = ("gpu07",)
OMPI = {f"OMPI_COMM_WORLD_{k}": v for k, v in dict(RANK="2", SIZE="4", LOCAL_RANK="0", LOCAL_SIZE="2").items()}
TWO = OMPI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}
DAEMON = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
LOCAL = TORCHRUN | {"HPCLM_LAUNCHER": "local"}
NODES = ("gpu07", "gpu07", "gpu08", "gpu08")
FIRST = ("gpu07",)
IN_SLURM = World("Slurm", 3, 4, 1, 2, "7.0.0", NODES, FIRST)
DEALT = {order: SLURM | {"SLURM_DISTRIBUTION": order} for order in ("block:cyclic", "cyclic", "arbitrary")}
ADDRESSES = {"SLURM_HPCLM_ADDRESSES": "10.0.0.7 fd00::7 10.77.0.7 "}


@pytest.mark.parametrize(
    "env, world",
    {
        "nobody": ({}, World("single", 0, 1)),
        "a batch script, not a step": (BATCH, World("single", 0, 1)),
        "srun": (SLURM, IN_SLURM),
        "srun after a requeue": (
            SLURM | {"SLURM_RESTART_COUNT": "2"},
            World("Slurm", 3, 4, 1, 2, "7.0.2", NODES, FIRST),
        ),
        "srun, block by block": (DEALT["block:cyclic"], IN_SLURM),
        "srun, ranks in turn": (DEALT["cyclic"], World("Slurm", 3, 4, 1, 2, "7.0.0", (), FIRST)),
        "srun with a host file": (DEALT["arbitrary"], World("Slurm", 3, 4, 1, 2, "7.0.0", (), ("gpu07", "gpu08"))),
        "srun in a script of hpclm": (
            SLURM | ADDRESSES,
            World("Slurm", 3, 4, 1, 2, "7.0.0", NODES, (*FIRST, "10.0.0.7", "10.77.0.7")),
        ),
        "srun --mpi=pmi2, with no MPI behind it": (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}, IN_SLURM),
        "mpirun": (OMPI, World("Open MPI", 2, 4, 0, 2)),
        "MPICH or Intel MPI": (HYDRA, World("MPI", 1, 2, 1, 2)),
        "mpirun in a batch script": (BATCH | OMPI, World("Open MPI", 2, 4, 0, 2)),
        "mpirun's daemons started by srun": (DAEMON | OMPI, World("Open MPI", 2, 4, 0, 2)),
        "torchrun in srun": (SLURM | TORCHRUN, World("torchrun", 1, 2, 1, 2, "x.0", (), STORE)),
        "torchrun in mpirun in srun": (DAEMON | TWO | TORCHRUN, World("torchrun", 1, 2, 1, 2, "x.0", (), STORE)),
        "hpclm's own": (LOCAL | BATCH, World("local", 1, 2, 1, 2, "x.0", (), STORE)),
    }.values(),
)
def test_the_innermost_launcher_says_who_this_process_is(env, world):
    assert detect(env) == world


@pytest.mark.parametrize(
    "env, message",
    [
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID is missing"),
        (OMPI | {"OMPI_COMM_WORLD_SIZE": "four"}, "four"),
        (SLURM | {"SLURM_PROCID": "4"}, "rank 4 of 4"),
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2 contradict each other"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "$(x)"}, "SLURM_NODEID=1 contradict each other"),
        (SLURM | {"SLURM_NTASKS": "16"}, "Slurm started 4 processes, but SLURM_NTASKS=16"),  # sbatch inside a step
        (SLURM | TWO, "Open MPI started 2 processes, but SLURM_STEP_NUM_TASKS=4"),
        (SLURM | {"SLURM_HET_SIZE": "2"}, "this is a heterogeneous Slurm job"),
        (SLURM | TORCHRUN | {"SLURM_HET_SIZE": "2"}, "this is a heterogeneous Slurm job"),
        (SLURM | HYDRA, "MPI started 2 processes, but SLURM_STEP_NUM_TASKS=4"),
        (
            OMPI | TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "but OMPI_COMM_WORLD_SIZE=4",
        ),
        (OMPI | LOCAL | {"WORLD_SIZE": "2"}, "but OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "PMI_SIZE=4"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
    ],
)
def test_what_does_not_add_up_is_refused_with_what_was_seen(env, message):
    with pytest.raises(ConfigError, match=message.replace("$", r"\$").replace("(", r"\(").replace(")", r"\)")):
        detect(env)


def test_a_process_without_its_peers_may_look_but_not_train():
    assert detect(BATCH).size == 1
    with pytest.raises(ConfigError, match=r"8 tasks .SLURM_NTASKS., but this process was started alone"):
        detect(BATCH, alone=False)
    assert detect(BATCH | {"SLURM_NTASKS": "1"}, alone=False).size == 1
    assert detect(BATCH | LOCAL, alone=False).size == 2
