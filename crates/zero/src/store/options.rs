//! What a store must know, and that as what is asked of a placement.

use ferrospeed_collective::hops::Hops;
use ferrospeed_comm::Group;
use ferrospeed_config::{DataType, Zero};
use ferrospeed_optim::muon::Muon;
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_placement::buckets::Kind;
use ferrospeed_placement::{
    DeviceKind, GroupFacts, ParamFacts, Placement, Request, Spread, UpdateRule, place,
};
use ferrospeed_tensor::{DType, Device, Param};

use crate::homes::Homes;
use crate::reducer::Road;
use crate::sharding::{Elsewhere, Sharding};

/// Parameters that share optimizer options.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// The parameters, in order. Frozen ones are left alone.
    pub params: Vec<Param>,
    /// Their options.
    pub options: GroupOptions,
}

/// Everything a store must know.
pub struct StoreOptions<'a> {
    /// The `zero_optimization` section.
    pub zero: &'a Zero,
    /// The type kernels read weights in.
    pub dtype: DType,
    /// The type gradients travel in.
    pub wire: DType,
    /// The type reduced gradients are kept in.
    pub kept: DType,
    /// Whether micro-batches are added up before a step.
    pub accumulates: bool,
    /// `gradient_predivide_factor`.
    pub predivide: f64,
    /// `prescale_gradients`.
    pub prescale: bool,
    /// `sparse_gradients`: below stage 1, gradients of tables travel as rows.
    pub sparse_gradients: bool,
    /// Over which ranks state is spread.
    pub sharding: Sharding,
    /// What is spread in another way.
    pub elsewhere: &'a [Elsewhere],
    /// The ranks that hold different parts of one model (stages, slices, experts) and must come to one norm, and to one
    /// decision to step: all of them. `None` where every shard holds the whole model.
    pub agreement: Option<Group>,
    /// Whether every micro-batch is reduced when it ends, in stages 0 and 1 too, where once per step is enough.
    pub reduces_each_micro_batch: bool,
    /// Parameters that stage 3 gathers and releases together, by leaf module: parts that ranks read unlike each other.
    pub leaf_modules: &'a [Vec<Param>],
    /// The update rule; `None` when nothing is trained.
    pub optimizer: Option<Optimizer>,
    /// Where state is at home.
    pub homes: Homes,
}

/// How the gradients of one way of being spread become their average.
pub(super) fn road(options: &StoreOptions<'_>, sharding: &Sharding, hops: Option<Hops>) -> Road {
    let n = sharding.divisor as f64;
    // The plain average rounds once. A predivide factor f multiplies by 1/f before and f/n after; prescaling
    // multiplies by 1/n before.
    let (before, after) = if options.prescale {
        (1.0 / n, Some(1.0))
    } else if options.predivide != 1.0 {
        (1.0 / options.predivide, Some(options.predivide / n))
    } else if sharding.divisor != sharding.ranks() {
        (1.0, Some(1.0 / n))
    } else {
        (1.0, None)
    };
    Road { sharding: sharding.clone(), before: before as f32, after: after.map(|after| after as f32), hops }
}

/// What is known of a model's parameters before they are placed: by parameter, its trained group and place there (the group
/// after the last: nobody trains it), which way it is spread, and how its gradient travels.
pub(super) struct Known<'a> {
    pub(super) params: &'a [Param],
    pub(super) places: &'a [(usize, usize)],
    pub(super) spreads: &'a [usize],
    pub(super) kinds: &'a [Kind],
}

/// Places a model's state.
pub(super) fn placement(
    options: &StoreOptions<'_>,
    known: &Known<'_>,
    groups: &[ParamGroup],
    shardings: &[&Sharding],
    device: &Device,
    world: usize,
) -> Placement {
    let facts = |(index, param): (usize, &Param)| ParamFacts {
        numel: param.numel(),
        dims: param.shape().dims(),
        group: Some(known.places[index]).filter(|(group, _)| *group < groups.len()),
        spread: known.spreads[index],
        kind: known.kinds[index],
    };
    let params: Vec<ParamFacts> = known.params.iter().enumerate().map(facts).collect();
    let optimizer = options.optimizer.as_ref();
    let groups: Vec<GroupFacts> = groups.iter().map(|group| group_facts(optimizer, &group.options)).collect();
    let spreads: Vec<Spread> = shardings.iter().map(|sharding| sharding.spread()).collect();
    let scales: Vec<bool> = shardings.iter().map(|sharding| road(options, sharding, None).scales()).collect();
    place(&Request {
        zero: options.zero,
        params: &params,
        groups: &groups,
        spreads: &spreads,
        world,
        device: if device.backend().is_host() { DeviceKind::Host } else { DeviceKind::Beside },
        values: data_type(options.dtype),
        wire: data_type(options.wire),
        kept: data_type(options.kept),
        accumulates: options.accumulates,
        reduces_each_micro_batch: options.reduces_each_micro_batch,
        scales: &scales,
        parts_differ: options.agreement.is_some(),
    })
}

/// What an optimizer asks of a group with these options.
pub fn group_facts(optimizer: Option<&Optimizer>, options: &GroupOptions) -> GroupFacts {
    let states = optimizer.map_or(0, |optimizer| optimizer.state_names(options).len());
    GroupFacts { states, rule: update_rule(optimizer, options) }
}

/// How a group's weights follow from gradients.
fn update_rule(optimizer: Option<&Optimizer>, options: &GroupOptions) -> UpdateRule {
    match optimizer {
        None => UpdateRule::None,
        Some(Optimizer::Lamb(_)) => UpdateRule::EachTensor,
        Some(Optimizer::Muon(_)) if Muon::moves(options) => UpdateRule::EachMatrix,
        Some(Optimizer::OneBit(_)) => UpdateRule::Momentum,
        Some(optimizer) if optimizer.is_of_the_host() => UpdateRule::EachElementOnHost,
        Some(_) => UpdateRule::EachElement,
    }
}

/// A type of floating-point numbers as configurations have it.
pub fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::BF16 => DataType::Bf16,
        DType::F16 => DataType::Fp16,
        _ => DataType::Fp32,
    }
}
