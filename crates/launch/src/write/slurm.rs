//! A script for `sbatch`.
//!
//! Slurm tells the script, and not its steps, when its time is nearly over (`--signal=B:…`): the script tells the ranks, waits until
//! they have saved, and puts the job into the queue again. `--open-mode=append` keeps what earlier attempts said.

use super::Request;
use crate::shell::quote;

pub(super) fn script(request: &Request) -> String {
    let Request { name, nodes, ranks_per_node, notice_s, .. } = request;
    let is_elastic = request.min_nodes.is_some();
    let mut options = vec![
        format!("--job-name={name}"),
        format!("--nodes={nodes}"),
        format!("--ntasks-per-node={}", if is_elastic { 1 } else { *ranks_per_node }),
    ];
    if request.gpus {
        options.push(format!("--gpus-per-node={ranks_per_node}"));
    }
    options.extend(["--requeue", "--open-mode=append"].map(str::to_owned));
    options.push(format!("--signal=B:USR2@{notice_s}"));
    match request.array {
        // One after the other: they are the same run.
        Some(count) => {
            options.push(format!("--array=1-{count}%1"));
            options.push("--output=%x-%A.log".to_owned());
        }
        None => options.push("--output=%x-%j.log".to_owned()),
    }
    if is_elastic {
        // A node that is lost does not end the job.
        options.push("--no-kill".to_owned());
    }
    options.extend(request.options.iter().cloned());
    let mut text = String::from("#!/bin/bash\n");
    options.iter().for_each(|option| text.push_str(&format!("#SBATCH {option}\n")));
    text.push_str(BEGIN);
    text.push_str(&if is_elastic { elastic(request) } else { fixed(request) });
    text.push_str(END);
    text
}

const BEGIN: &str = r#"
# A secret of this job's ranks; srun hands it on.
export FERROSPEED_JOB_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
"#;

fn fixed(request: &Request) -> String {
    // Ranks that fail are noticed by the others, which end; ranks that save leave one by one, and none is killed for it.
    format!("\nsrun --kill-on-bad-exit=0 {} &\n", request.command())
}

fn elastic(request: &Request) -> String {
    let (command, executable) = (request.command(), quote(&request.executable));
    let Request { nodes, ranks_per_node, min_nodes, .. } = request;
    let (min_nodes, grace) = (min_nodes.unwrap_or(1), request.grace());
    format!(
        r#"
# On each node an agent; here who leads them. What the agents exit with is not asked: nodes may be lost.
srun --kill-on-bad-exit=0 --no-kill {executable} agent --meet "$MASTER_ADDR:$MASTER_PORT" {grace} -n {ranks_per_node} -- {command} &
{executable} launch --elastic_training --no_agents --min_nodes {min_nodes} --max_nodes {nodes} \
  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" -- {command} &
"#
    )
}

const END: &str = r#"job=$!
trap 'kill -USR2 $job' USR2
trap 'kill -TERM $job' TERM
# A signal ends a wait, not the job.
while :; do
  wait $job
  code=$?
  kill -0 $job 2>/dev/null || break
done
# 75: the run saved and left as it was told; it goes on when the queue lets it.
if [ $code = 75 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
fi
exit $code
"#;
