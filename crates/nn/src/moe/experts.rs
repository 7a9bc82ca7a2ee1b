//! The experts: from rows sorted by expert to rows in the same order.
//!
//! Perceptrons of one kind are multiplied together, group by group, without the host knowing how many rows each has. Any
//! other layer can be an expert too; then the host reads the counts and runs one after the other.

use std::sync::Arc;

use ferrospeed_comm::Group;
use ferrospeed_tensor::ops::{self, GroupWeights, GroupedLayer, Routes, WeightLayout};
use ferrospeed_tensor::{Activation, Operand, Result, Tensor, TensorError};

use super::apart;
use super::stacked::StackedExperts;
use crate::init::Init;
use crate::linear::Linear;
use crate::mlp::{GatedMlp, Mlp};
use crate::tensor_parallel::{Slices, enter};
use crate::{Mode, Module};

/// One expert.
#[derive(Clone)]
pub enum Expert {
    /// `down(f(gate(x)) · up(x))`.
    Gated(GatedMlp),
    /// `down(f(up(x)))`.
    Plain(Mlp),
    /// Any layer from rows `[tokens, width]` to rows of the same width.
    Layer(Arc<dyn Module>),
}

impl From<GatedMlp> for Expert {
    fn from(mlp: GatedMlp) -> Self {
        Expert::Gated(mlp)
    }
}

impl From<Mlp> for Expert {
    fn from(mlp: Mlp) -> Self {
        Expert::Plain(mlp)
    }
}

impl From<Arc<dyn Module>> for Expert {
    fn from(layer: Arc<dyn Module>) -> Self {
        Expert::Layer(layer)
    }
}

/// The same linear layer of all experts.
#[derive(Clone)]
struct GroupedLinear {
    weights: GroupWeights,
    biases: Option<GroupWeights>,
    layout: WeightLayout,
    /// The ranks whose results are summed, where inputs are cut.
    summed: Option<Slices>,
}

impl GroupedLinear {
    /// `None` where they are not alike, or where biases come behind a sum over ranks.
    fn of(layers: &[&Linear]) -> Option<GroupedLinear> {
        let first = layers.first()?;
        if layers.iter().any(|layer| layer.summed_over().is_some() && layer.bias().is_some()) {
            return None;
        }
        let alike = |other: &&Linear| {
            other.layout() == first.layout()
                && other.weight().shape() == first.weight().shape()
                && other.bias().is_some() == first.bias().is_some()
        };
        let weights = GroupWeights::Each(layers.iter().map(|layer| Operand::from(layer.weight())).collect());
        let biases: Vec<Operand> =
            layers.iter().filter_map(|layer| layer.bias().map(Operand::from)).collect();
        layers.iter().all(alike).then(|| GroupedLinear {
            weights,
            biases: (!biases.is_empty()).then_some(GroupWeights::Each(biases)),
            layout: first.layout(),
            summed: first.summed_over().cloned(),
        })
    }

    fn forward(&self, rows: &Tensor, counts: &Tensor) -> Result<Tensor> {
        let GroupedLayer { weights, biases, layout } = self.layer();
        self.summed(ops::grouped_linear(rows, counts, weights, biases, layout)?)
    }

    fn layer(&self) -> GroupedLayer<'_> {
        GroupedLayer { weights: &self.weights, biases: self.biases.as_ref(), layout: self.layout }
    }

    /// The sum of all ranks' products, where inputs are cut.
    fn summed(&self, product: Tensor) -> Result<Tensor> {
        match &self.summed {
            Some(slices) => slices.leave(&product),
            None => Ok(product),
        }
    }
}

#[derive(Clone)]
enum Way {
    /// Gate, up and down.
    Gated(Box<[GroupedLinear; 3]>, Activation),
    /// Up and down.
    Plain(Box<[GroupedLinear; 2]>, Activation),
    Stacked(Box<StackedExperts>),
    OneByOne(Vec<Arc<dyn Module>>),
}

/// All experts of a layer. Cloning copies handles.
#[derive(Clone)]
pub struct Experts {
    count: usize,
    way: Way,
}

impl std::fmt::Debug for Experts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.way {
            Way::Gated(..) => "gated perceptrons",
            Way::Plain(..) => "perceptrons",
            Way::Stacked(_) => "stacked perceptrons",
            Way::OneByOne(_) => "layers",
        };
        write!(f, "{} experts ({kind})", self.count)
    }
}

impl Experts {
    /// Together where they are perceptrons of one kind, else one by one.
    pub fn new(experts: Vec<Expert>) -> Experts {
        let way = gated(&experts).or_else(|| plain(&experts));
        Experts { count: experts.len(), way: way.unwrap_or_else(|| Way::OneByOne(layers(experts))) }
    }

    /// So many whose parameters lie stacked.
    pub fn stacked(count: usize, experts: StackedExperts) -> Experts {
        Experts { count, way: Way::Stacked(Box::new(experts)) }
    }

    /// Makes `count` experts below `place`, each at its number. Where they are spread over a group, every rank makes the
    /// parameters of all and keeps its own. That they divide evenly is checked by the layer that uses them.
    pub fn spread<E: Into<Expert>>(
        place: &Init,
        count: usize,
        group: Option<&Group>,
        expert: impl Fn(&Init, usize) -> E,
    ) -> Experts {
        let Some(group) = group else {
            return Experts::new((0..count).map(|index| expert(&place.at(index), index).into()).collect());
        };
        let made = |index: usize| {
            let holder = apart::holder(index, count, group.size());
            let expert = expert(&place.at(index).held_by(holder), index).into();
            (holder.rank == group.rank()).then_some(expert)
        };
        Experts::new((0..count).filter_map(made).collect())
    }

    pub(super) fn expect(&self, count: usize) -> Result<()> {
        if self.count == count {
            return Ok(());
        }
        Err(TensorError::argument("moe", format!("{} experts where {count} are routed to", self.count)))
    }

    /// What the experts make of `x [tokens, width]`: each token goes to those that were chosen for it, and gets the sum of their
    /// results, by `weights [tokens, chosen]`.
    pub(super) fn mixed(&self, x: &Tensor, routes: &Routes, weights: &Tensor, mode: Mode) -> Result<Tensor> {
        if let Way::Gated(layers, activation) = &self.way
            && layers[2].summed.is_none()
            && layers[2].biases.is_none()
        {
            let layers = layers.each_ref().map(GroupedLinear::layer);
            return ops::routed_gated_mlp(x, weights, routes, layers, *activation);
        }
        routes.collect(&self.forward(&routes.spread(x)?, routes.counts(), mode)?, weights)
    }

    /// What the experts make of `rows [rows, width]`, sorted by expert, of which `counts [experts]` (`I64`, in the memory of
    /// the device) says how many each has. The result has the same order; rows behind the last expert's are zero.
    pub fn forward(&self, rows: &Tensor, counts: &Tensor, mode: Mode) -> Result<Tensor> {
        match &self.way {
            Way::Gated(layers, activation) => {
                let [gate, up, down] = &**layers;
                let rows = enter(rows, down.summed.as_ref())?;
                let layers = [gate, up, down].map(GroupedLinear::layer);
                down.summed(ops::grouped_gated_mlp(&rows, counts, layers, *activation)?)
            }
            Way::Plain(layers, activation) => {
                let [up, down] = &**layers;
                let rows = enter(rows, down.summed.as_ref())?;
                down.forward(&ops::activate(&up.forward(&rows, counts)?, *activation)?, counts)
            }
            Way::Stacked(experts) => experts.forward(rows, counts),
            Way::OneByOne(layers) => one_by_one(layers, rows, counts, mode),
        }
    }
}

fn gated(experts: &[Expert]) -> Option<Way> {
    let mut found = Vec::new();
    for expert in experts {
        let Expert::Gated(mlp) = expert else { return None };
        found.push((mlp.layers(), mlp.activation()));
    }
    let (layers, activation) = alike(found)?;
    Some(Way::Gated(layers, activation))
}

fn plain(experts: &[Expert]) -> Option<Way> {
    let mut found = Vec::new();
    for expert in experts {
        let Expert::Plain(mlp) = expert else { return None };
        found.push((mlp.layers(), mlp.activation()));
    }
    let (layers, activation) = alike(found)?;
    Some(Way::Plain(layers, activation))
}

/// The layers of all perceptrons, each together; `None` where they are not of one kind.
fn alike<const N: usize>(
    experts: Vec<([&Linear; N], Activation)>,
) -> Option<(Box<[GroupedLinear; N]>, Activation)> {
    let activation = experts.first()?.1;
    let together =
        |index| GroupedLinear::of(&experts.iter().map(|(layers, _)| layers[index]).collect::<Vec<_>>());
    let layers: Vec<GroupedLinear> = (0..N).map(together).collect::<Option<_>>()?;
    let is_one_kind = experts.iter().all(|(_, other)| *other == activation);
    is_one_kind.then_some(())?;
    Some((Box::new(layers.try_into().ok()?), activation))
}

fn layers(experts: Vec<Expert>) -> Vec<Arc<dyn Module>> {
    let layer = |expert| -> Arc<dyn Module> {
        match expert {
            Expert::Gated(mlp) => Arc::new(mlp),
            Expert::Plain(mlp) => Arc::new(mlp),
            Expert::Layer(layer) => layer,
        }
    };
    experts.into_iter().map(layer).collect()
}

/// An expert without rows runs on one row of zeros that is cut off again: it gets a gradient of zeros, so that ranks whose
/// routers choose differently do the same things together.
fn one_by_one(layers: &[Arc<dyn Module>], rows: &Tensor, counts: &Tensor, mode: Mode) -> Result<Tensor> {
    let (total, width) = (rows.sizes()[0], rows.shape().last());
    let (mut results, mut idle, mut start) = (Vec::new(), Vec::new(), 0usize);
    for (layer, count) in layers.iter().zip(counts.to_vec::<i64>()?) {
        let count = usize::try_from(count).ok().filter(|count| start + count <= total);
        let count = count
            .ok_or_else(|| TensorError::argument("moe", format!("the counts are not of {total} rows")))?;
        match count {
            0 => idle.push(layer.forward(&Tensor::zeros([1, width], rows.dtype(), rows.device())?, mode)?),
            _ => results.push(layer.forward(&ops::narrow(rows, 0, start, count)?, mode)?),
        }
        start += count;
    }
    let out = results.iter().chain(&idle).map(|result| result.shape().last()).next().unwrap_or(width);
    if start < total {
        results.push(Tensor::zeros([total - start, out], rows.dtype(), rows.device())?);
    }
    results.extend(idle);
    ops::narrow(&ops::concat(&results, 0)?, 0, 0, total)
}
