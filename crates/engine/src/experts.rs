//! Experts on several ranks: which of a model's parameters this rank holds, and over which ranks their state is spread.
//!
//! An expert gets tokens of all ranks of its expert group, so its gradient is the sum of theirs already; it is summed once more
//! over the ranks that hold the same expert, and divided by the number of ranks that see different samples, like every other
//! weight's. DeepSpeed divides by the ranks that hold the same expert alone from stage 1 on, which makes gradients of experts
//! too large by the size of the expert group.

use std::collections::HashMap;

use ferrospeed_comm::{ExpertMembership, Mesh};
use ferrospeed_config::Config;
use ferrospeed_nn::{Holder, Parameters};
use ferrospeed_tensor::Param;
use ferrospeed_zero::{Elsewhere, ParamGroup, Sharding};

use crate::error::{EngineError, Result};
use crate::parts::{Held, Parts};
use crate::setup::Options;

/// What of a model with spread experts this rank holds.
pub(crate) struct Own {
    /// The parameters that it gives values.
    pub(crate) parameters: Parameters,
    /// Those of its experts, and how they are spread.
    pub(crate) elsewhere: Vec<Elsewhere>,
    /// What it knows of the others.
    pub(crate) parts: Parts,
}

impl Options<'_> {
    /// On a mesh of which these groups hold different experts: the rest is spread as [`Options::spread_over`] says. All ranks
    /// call it together.
    pub fn spread_experts(&mut self, mesh: &Mesh, groups: ExpertMembership) -> Result<()> {
        if self.mesh.is_none() {
            self.spread_over(mesh)?;
        }
        self.agreement = Some(mesh.world().group());
        self.experts.push(groups);
        Ok(())
    }
}

const KEY: &str = "expert_parallel.autoep_size";

/// Refuses a model whose experts are not spread as the configuration asks.
pub(crate) fn check(config: &Config, parameters: &Parameters) -> Result<()> {
    let asked =
        config.section("expert_parallel").and_then(|section| section["autoep_size"].as_u64()).unwrap_or(1);
    let is_spread =
        |param: &Param| parameters.holder(param).is_some_and(|holder| holder.ranks as u64 == asked);
    if asked <= 1 || parameters.as_slice().iter().any(is_spread) {
        return Ok(());
    }
    let why = format!(
        "the configuration asks for experts spread over {asked} ranks, and the model's are not: build it for the expert group of Mesh::expert({asked}, …), and call Options::spread_experts"
    );
    Err(EngineError::Argument { what: KEY, why })
}

/// The part of a model that this rank holds; `None` where it holds all. Parameters of other ranks' experts leave `groups`.
pub(crate) fn own_part(
    config: &Config,
    parameters: &Parameters,
    groups: &mut [ParamGroup],
    experts: &[ExpertMembership],
    common: &Sharding,
) -> Result<Option<Own>> {
    let mut by_way: Vec<(Elsewhere, usize)> = Vec::new();
    let mut holders = HashMap::new();
    for param in parameters.as_slice() {
        let holder = parameters.holder(param).filter(|holder| holder.ranks > 1);
        let Some(Holder { ranks, rank }) = holder else { continue };
        let Some(groups) = experts.iter().find(|groups| groups.expert.size() == ranks) else {
            let why = format!(
                "'{}' is of experts that are spread over {ranks} ranks, and the engine was not told which: call Options::spread_experts with Mesh::expert's groups",
                param.name()
            );
            return Err(EngineError::Argument { what: KEY, why });
        };
        holders.insert(param.id(), Held { group: groups.expert.clone(), rank });
        if rank != groups.expert.rank() {
            continue;
        }
        match by_way.iter_mut().find(|(_, size)| *size == ranks) {
            Some((way, _)) => way.params.push(param.clone()),
            None => {
                let sharding = Sharding::over(&groups.expert_data).divided_by(common.divisor);
                by_way.push((Elsewhere { params: vec![param.clone()], sharding }, ranks));
            }
        }
    }
    if holders.is_empty() {
        return Ok(None);
    }
    if config.section("eigenvalue").is_some_and(|section| section["enabled"] == true) {
        let why = "it measures whole blocks, and ranks hold different experts of them; remove it".to_owned();
        return Err(EngineError::Unsupported { key: "eigenvalue", why });
    }
    let all: Vec<_> = groups.iter().map(|group| group.params.as_slice()).collect();
    let is_own = |id: u64| holders.get(&id).is_none_or(|held: &Held| held.rank == held.group.rank());
    let (own, _) = parameters.partition(|param| is_own(param.id()));
    let of_groups: Vec<Vec<_>> = all
        .iter()
        .map(|params| params.iter().filter(|param| is_own(param.id())).cloned().collect())
        .collect();
    let parts = Parts::of(parameters, &all, holders);
    groups.iter_mut().zip(of_groups).for_each(|(group, params)| group.params = params);
    let elsewhere = by_way.into_iter().map(|(way, _)| way).collect();
    Ok(Some(Own { parameters: own, elsewhere, parts }))
}
