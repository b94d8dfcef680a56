"""What `qstat -f` of PBS prints of a job that was submitted with options and variables."""


def qstat_record(job: str, walltime: str, variables: str) -> str:
    """`variables`: those of `qsub -v`, NAME=VALUE, each with a comma behind it."""
    return f"""Job Id: {job}
    Job_Name = name
    queue = small
    Account_Name = acct
    group_list = lab
    project = _pbs_project_default
    Mail_Points = a
    Resource_List.filesystems = home:scratch
    Resource_List.mpiprocs = 4
    Resource_List.ncpus = 4
    Resource_List.nodect = 2
    Resource_List.place = scatter
    Resource_List.select = 2:ncpus=2:mpiprocs=2
    Resource_List.walltime = {walltime}
    schedselect = 2:ncpus=2:mpiprocs=2
    Variable_List = PBS_O_HOME=/root,PBS_O_PATH=/opt/pbs/bin:/usr/sb
\tin:/bin,{variables}PBS_O_QUEUE=entry"""
