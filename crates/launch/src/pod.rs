//! A node's place as a scheduler of containers tells it: torchrun's own variables, which Kubeflow's trainer sets for each pod, and
//! those of an indexed Job.
//!
//! | variable | what it says |
//! | --- | --- |
//! | `PET_NNODES` | nodes of the job; `MIN:MAX` is no fixed number, and refused |
//! | `PET_NODE_RANK`, else `JOB_COMPLETION_INDEX` | which of them this is |
//! | `PET_NPROC_PER_NODE` | ranks of each; `auto`, `gpu` and `cpu` are left to the launcher |
//! | `PET_MASTER_ADDR`, `PET_MASTER_PORT`, else `MASTER_ADDR`, `MASTER_PORT` | where rank 0 listens |

use crate::error::LaunchError;
use crate::exports::Environment;
use crate::options::DEFAULT_MASTER_PORT;

/// Which node of which job this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodPlace {
    /// Nodes of the job.
    pub nodes: u32,
    /// Which of them this is.
    pub node_rank: u32,
    /// Ranks of each, where that is said.
    pub ranks: Option<u32>,
    /// Where rank 0 listens.
    pub master_addr: String,
    /// The port there.
    pub master_port: u16,
}

/// Reads it; `None` where no scheduler says anything.
pub fn place(environment: &Environment) -> Result<Option<PodPlace>, LaunchError> {
    let given =
        |name: &str| environment.get(name).map(|value| value.trim()).filter(|value| !value.is_empty());
    let Some(nodes) = given("PET_NNODES") else { return Ok(None) };
    let refuse = |name: &str, value: &str, why: &str| LaunchError::Usage(format!("{name}={value}: {why}"));
    let number = |name: &str, value: &str| -> Result<u32, LaunchError> {
        value.parse().map_err(|_| refuse(name, value, "not a whole number"))
    };
    if nodes.contains(':') {
        let why = "an elastic job's nodes are agents (`ferrospeed agent`); give a fixed number of nodes";
        return Err(refuse("PET_NNODES", nodes, why));
    }
    let nodes = number("PET_NNODES", nodes)?;
    let rank =
        ["PET_NODE_RANK", "JOB_COMPLETION_INDEX"].into_iter().find_map(|name| Some((name, given(name)?)));
    let (rank_name, rank) = match rank {
        Some(found) => found,
        None if nodes == 1 => ("PET_NODE_RANK", "0"),
        None => {
            return Err(refuse(
                "PET_NNODES",
                &nodes.to_string(),
                "PET_NODE_RANK is missing, which says which node this is",
            ));
        }
    };
    let node_rank = number(rank_name, rank)?;
    if node_rank >= nodes {
        return Err(refuse(rank_name, rank, &format!("there are {nodes} node(s), counted from 0")));
    }
    let ranks = given("PET_NPROC_PER_NODE").filter(|ranks| !["auto", "gpu", "cpu"].contains(ranks));
    let ranks = ranks.map(|ranks| number("PET_NPROC_PER_NODE", ranks)).transpose()?;
    let master = ["PET_MASTER_ADDR", "MASTER_ADDR"].into_iter().find_map(given);
    let master_addr = match master {
        Some(addr) => addr.to_owned(),
        None if nodes == 1 => "127.0.0.1".to_owned(),
        None => {
            return Err(refuse(
                "PET_NNODES",
                &nodes.to_string(),
                "PET_MASTER_ADDR is missing, where the first node is reached",
            ));
        }
    };
    let port = ["PET_MASTER_PORT", "MASTER_PORT"].into_iter().find_map(|name| Some((name, given(name)?)));
    let master_port = match port {
        None => DEFAULT_MASTER_PORT,
        Some((name, port)) => port.parse().map_err(|_| refuse(name, port, "not a port"))?,
    };
    Ok(Some(PodPlace { nodes, node_rank, ranks, master_addr, master_port }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<PodPlace>, String> {
        let environment =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        place(&environment).map_err(|error| error.to_string())
    }

    #[test]
    fn a_pod_of_kubeflows_trainer_knows_its_place() {
        let variables = [
            ("PET_NNODES", "4"),
            ("PET_NPROC_PER_NODE", "8"),
            ("PET_NODE_RANK", "3"),
            ("PET_MASTER_ADDR", "job-node-0-0.job"),
            ("PET_MASTER_PORT", "29400"),
        ];
        let place = of(&variables).unwrap().unwrap();
        let expected = PodPlace {
            nodes: 4,
            node_rank: 3,
            ranks: Some(8),
            master_addr: "job-node-0-0.job".to_owned(),
            master_port: 29_400,
        };
        assert_eq!(place, expected);
        assert_eq!(of(&[]).unwrap(), None);
        assert_eq!(of(&[("MASTER_ADDR", "left in a shell")]).unwrap(), None);
    }

    #[test]
    fn an_indexed_jobs_number_and_plain_names_will_do_and_half_a_place_is_told() {
        let place = of(&[
            ("PET_NNODES", "2"),
            ("JOB_COMPLETION_INDEX", "1"),
            ("MASTER_ADDR", "a"),
            ("PET_NPROC_PER_NODE", "auto"),
        ]);
        let place = place.unwrap().unwrap();
        assert_eq!((place.node_rank, place.ranks, place.master_port), (1, None, 29_500));
        for (variables, why) in [
            (&[("PET_NNODES", "1:4")][..], "agents"),
            (&[("PET_NNODES", "2"), ("MASTER_ADDR", "a")], "PET_NODE_RANK is missing"),
            (&[("PET_NNODES", "2"), ("PET_NODE_RANK", "0")], "PET_MASTER_ADDR is missing"),
            (&[("PET_NNODES", "2"), ("PET_NODE_RANK", "2")], "counted from 0"),
            (&[("PET_NNODES", "two")], "not a whole number"),
        ] {
            let said = of(variables).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
    }
}
