//! What hosts send each other in a step, and what would make it less.
//!
//! A host's link is where ranks wait, so bytes are those that one host of several, with as many ranks each, sends: the one
//! that sends most. A gather brings every host's part to the others. A reduction sends every rank's values to their owners,
//! or one accumulator from host to host where that is less. Integers are counted with their steps; small messages (norms,
//! agreements) and what ranks of one host say to each other are not. Tokens that go to experts on other hosts, and come back,
//! are counted as a balanced router sends them.

use std::fmt;

use ferrospeed_config::{Config, DataType, Optimizer, Stage};

use crate::model::Model;
use crate::plan::{Request, human};

/// Bytes that travel with each value of a quantised weight, its part of a step included, and of a gradient.
pub(crate) const INT8: f64 = 1.0 + 4.0 / 2048.0;
pub(crate) const INT4: f64 = 0.5 + 4.0 / 512.0;
/// Bits of a byte: signs in it.
pub(crate) const SIGNS: f64 = 8.0;
/// What reductions add up in.
const ACCUMULATOR: f64 = 4.0;

/// How model state travels between hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// As it is.
    Plain,
    /// `zero_quantized_weights`.
    Int8Weights,
    /// `zero_hpz_partition_size`.
    NearWeights,
    /// `zero_quantized_gradients`.
    Int4Gradients,
    /// These three.
    AllOfZeroPlusPlus,
    /// A 1-bit optimizer, once it is frozen.
    OneBit,
}

/// What one way sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Crossing {
    /// The way.
    pub way: Way,
    /// Bytes that one host sends in a step.
    pub sent_bytes: u64,
}

/// What hosts send each other.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Crossings {
    /// How many hosts.
    pub hosts: u64,
    /// What the configuration asks for.
    pub configured: Crossing,
    /// What could be asked for in its place.
    pub others: Vec<Crossing>,
    /// What of all these goes to experts and back.
    pub routed_bytes: u64,
    /// What to do, where that sends at most half.
    pub advice: Option<String>,
}

/// How ranks lie on hosts, and what of the model they hold.
#[derive(Debug, Clone, Copy)]
pub struct Hosts {
    /// Data-parallel ranks of a host.
    pub ranks_per_host: u64,
    /// Ranks that share the experts of a layer.
    pub expert_ranks: u64,
    /// Whether those are neighbours; else neighbours hold the same experts.
    pub experts_are_neighbours: bool,
}

impl Hosts {
    /// Of so many ranks each, which all hold the whole model.
    pub fn of(ranks_per_host: u64) -> Hosts {
        Hosts { ranks_per_host, expert_ranks: 1, experts_are_neighbours: true }
    }

    /// How many of a rank's peers, of those that it shares experts with, are on other hosts: summed over the first host's ranks.
    fn far_peers(&self, ranks: u64) -> f64 {
        let (own, shared) = (self.ranks_per_host.min(ranks), self.expert_ranks.max(1));
        // So many ranks of the host each have so many peers on it, themselves included.
        let apart = (ranks / shared).max(1);
        let on_host = match self.experts_are_neighbours {
            true => [(own - own % shared, shared), (own % shared, own % shared)],
            false => {
                let (each, more) = (own / apart, own % apart);
                [(more * (each + 1), each + 1), ((apart - more) * each, each)]
            }
        };
        on_host.into_iter().map(|(count, near)| count as f64 * shared.saturating_sub(near) as f64).sum()
    }
}

/// What hosts send; `None` where there is one.
pub fn crossings(request: &Request<'_>, on: Hosts) -> Option<Crossings> {
    let ranks_per_host = on.ranks_per_host.max(1);
    let hosts = request.data_parallel_size.div_ceil(ranks_per_host);
    if hosts < 2 {
        return None;
    }
    let link = Link { request, on, hosts: hosts as f64, ranks: ranks_per_host as f64 };
    let zero = &request.config.zero;
    let stage_3 = zero.stage == Stage::Parameters;
    let near = link.neighbours();
    let switches = Switches {
        weights: zero.quantized_weights,
        near: zero.hpz_partition_size > 1 && zero.hpz_partition_size < request.data_parallel_size,
        gradients: zero.quantized_gradients,
    };
    let routed = link.routed();
    let sends = |way: Way, bytes: f64| Crossing { way, sent_bytes: (bytes + routed) as u64 };
    let configured = match is_one_bit(request.config) {
        true => sends(Way::OneBit, link.one_bit()),
        false if stage_3 => sends(switches.way(), link.stage_3(switches)),
        false => sends(Way::Plain, link.replicated()),
    };
    let mut others = Vec::new();
    if stage_3 {
        let each = Switches::each(near.is_some());
        others.extend(each.map(|switches| sends(switches.way(), link.stage_3(switches))));
    } else {
        others.push(sends(Way::Plain, link.replicated()));
        if link.holds_whole_model() {
            others.push(sends(Way::OneBit, link.one_bit()));
        }
    }
    others.retain(|other| other.way != configured.way);
    let least = others.iter().min_by_key(|other| other.sent_bytes);
    let least = least.filter(|least| least.sent_bytes.saturating_mul(2) <= configured.sent_bytes);
    let advice = least.map(|least| {
        let share = 100.0 * least.sent_bytes as f64 / configured.sent_bytes.max(1) as f64;
        format!("{} sends {share:.0} % of that: {}", least.way, least.way.how(near))
    });
    Some(Crossings { hosts, configured, others, advice, routed_bytes: routed as u64 })
}

fn is_one_bit(config: &Config) -> bool {
    matches!(config.optimizer, Some(Optimizer::OneBit(_)))
}

/// Which of ZeRO++ is on.
#[derive(Clone, Copy)]
struct Switches {
    weights: bool,
    near: bool,
    gradients: bool,
}

impl Switches {
    const NONE: Switches = Switches { weights: false, near: false, gradients: false };

    /// What may be asked for, with or without neighbours that could keep a copy.
    fn each(near: bool) -> impl Iterator<Item = Switches> {
        let each = [
            Switches::NONE,
            Switches { weights: true, ..Switches::NONE },
            Switches { near: true, ..Switches::NONE },
            Switches { gradients: true, ..Switches::NONE },
            Switches { weights: true, near, gradients: true },
        ];
        each.into_iter().filter(move |switches| near || !switches.near)
    }

    fn way(self) -> Way {
        match (self.weights, self.near, self.gradients) {
            (false, false, false) => Way::Plain,
            (true, false, false) => Way::Int8Weights,
            (false, true, false) => Way::NearWeights,
            (false, false, true) => Way::Int4Gradients,
            // Two of three are nearest to all.
            _ => Way::AllOfZeroPlusPlus,
        }
    }
}

/// The share of parameters that backward gathers again: not what stays from forward.
pub(crate) fn gathered_again(request: &Request<'_>) -> f64 {
    let zero = &request.config.zero;
    let params = request.model.size().total_params as f64;
    let stays = (zero.max_reuse_distance as f64 / 2.0).min(zero.max_live_parameters as f64) / params;
    1.0 - stays.min(1.0)
}

struct Link<'a> {
    request: &'a Request<'a>,
    on: Hosts,
    hosts: f64,
    ranks: f64,
}

/// Parameters that travel between the same ranks.
#[derive(Clone, Copy)]
struct Piece {
    /// How many of them a host has.
    params: f64,
    /// Ranks of a host that have each.
    ranks: f64,
    /// Hosts that have it.
    hosts: f64,
}

impl Piece {
    /// What is not a host's own.
    fn away(&self) -> f64 {
        (self.hosts - 1.0) / self.hosts
    }
}

impl Link<'_> {
    /// What every rank has, and the experts.
    fn pieces(&self) -> [Piece; 2] {
        let shared = self.on.expert_ranks.max(1) as f64;
        let held = match self.request.model {
            Model::Transformer(shape) if shared > 1.0 => shape.expert_params.saturating_mul(shape.layers),
            _ => 0,
        } as f64;
        let total = self.request.model.size().total_params as f64;
        // Different experts on a host, and ranks that have the same ones.
        let different = if self.on.experts_are_neighbours {
            shared.min(self.ranks)
        } else {
            1.0f64.max(shared / self.hosts)
        };
        let alike = (self.ranks / different).max(1.0);
        let copies = (self.request.data_parallel_size as f64 / shared).max(1.0);
        [
            Piece { params: total - held, ranks: self.ranks, hosts: self.hosts },
            Piece { params: held * different, ranks: alike, hosts: (copies / alike).clamp(1.0, self.hosts) },
        ]
    }

    /// Sums over both.
    fn sum(&self, bytes: impl Fn(Piece) -> f64) -> f64 {
        self.pieces().into_iter().filter(|piece| piece.params > 0.0).map(bytes).sum()
    }

    /// How many neighbouring ranks can hold a second copy without leaving their host: as many as divide both a host's ranks
    /// and all; `None` where none do, or state is not spread over all ranks.
    fn neighbours(&self) -> Option<u64> {
        let (ranks, on_host) = (self.request.data_parallel_size, self.on.ranks_per_host.max(1));
        let (mut size, mut rest) = (ranks, on_host);
        while rest > 0 {
            (size, rest) = (rest, size % rest);
        }
        let fits = self.request.config.zero.mics_shard_size.is_none() && !self.is_sliced();
        Some(size).filter(|&size| fits && size > 1)
    }

    fn is_sliced(&self) -> bool {
        matches!(self.request.model, Model::Transformer(shape) if shape.slices > 1)
    }

    /// Whether every rank holds all of the model and whole sequences, as 1-bit optimizers need it.
    fn holds_whole_model(&self) -> bool {
        self.on.expert_ranks <= 1 && self.request.sequence_ranks <= 1 && !self.is_sliced()
    }

    /// What goes to experts on other hosts and comes back, forward and backward.
    fn routed(&self) -> f64 {
        let Model::Transformer(shape) = self.request.model else { return 0.0 };
        if self.on.expert_ranks <= 1 {
            return 0.0;
        }
        let config = self.request.config;
        let tokens = config.batch.train_micro_batch_size_per_gpu.get() as f64
            * self.request.sequence_length.div_ceil(self.request.sequence_ranks.max(1)) as f64;
        let far = self.on.far_peers(self.request.data_parallel_size) / self.on.expert_ranks as f64;
        let per_token = 4.0 * (shape.layers * shape.hidden * shape.experts_per_token) as f64 * self.width();
        tokens * far * per_token * self.micro_batches()
    }

    fn width(&self) -> f64 {
        self.request.config.precision.data_type().bytes() as f64
    }

    fn gradient_width(&self) -> f64 {
        self.request
            .config
            .communication_data_type
            .map_or(self.width(), |data_type| DataType::bytes(data_type) as f64)
    }

    fn micro_batches(&self) -> f64 {
        self.request.config.batch.gradient_accumulation_steps.get() as f64
    }

    fn reduce_scatter(&self, piece: Piece) -> f64 {
        let direct = piece.ranks * self.gradient_width() * piece.away();
        let handed_on = if piece.ranks > 1.0 { ACCUMULATOR } else { f64::INFINITY };
        piece.params * direct.min(handed_on).max(0.0)
    }

    fn stage_3(&self, switches: Switches) -> f64 {
        let micro_batches = self.micro_batches();
        let width = if switches.weights { INT8 } else { self.width() };
        // Neighbours have everything among themselves until weights change.
        let gathers = if switches.near { 1.0 } else { micro_batches * (1.0 + gathered_again(self.request)) };
        self.sum(|piece| {
            let gradients = match switches.gradients {
                true => piece.params * INT4 * piece.away(),
                false => self.reduce_scatter(piece),
            };
            piece.params * width * piece.away() * gathers + gradients * micro_batches
        })
    }

    /// Stages 0 to 2.
    fn replicated(&self) -> f64 {
        self.sum(|piece| {
            let gather = piece.params * self.width() * piece.away();
            match self.request.config.zero.stage {
                _ if piece.hosts <= 1.0 => 0.0,
                // Sums go from host to host, and their result back.
                Stage::Off if piece.ranks > 1.0 => {
                    let back = if piece.hosts > 2.0 { self.gradient_width() } else { 0.0 };
                    piece.params * (ACCUMULATOR + back)
                }
                Stage::Off => piece.params * 2.0 * self.gradient_width() * piece.away(),
                Stage::Gradients => self.reduce_scatter(piece) * self.micro_batches() + gather,
                _ => self.reduce_scatter(piece) + gather,
            }
        })
    }

    fn one_bit(&self) -> f64 {
        // Every rank's signs go to their owners, and the owners' signs to every host.
        self.sum(|piece| piece.params / SIGNS * (piece.ranks + 1.0) * piece.away())
    }
}

impl Way {
    /// How it is asked for, where so many neighbours can hold a second copy.
    fn how(self, neighbours: Option<u64>) -> String {
        let near = neighbours.map_or_else(String::new, |size| format!("\"zero_hpz_partition_size\": {size}"));
        match self {
            Way::Plain => "remove what is set".to_owned(),
            Way::Int8Weights => "\"zero_quantized_weights\": true".to_owned(),
            Way::NearWeights => near,
            Way::Int4Gradients => "\"zero_quantized_gradients\": true".to_owned(),
            Way::AllOfZeroPlusPlus => {
                let near = if near.is_empty() { near } else { format!("{near}, ") };
                format!("\"zero_quantized_weights\": true, {near}\"zero_quantized_gradients\": true")
            }
            Way::OneBit => "\"stage\": 0 and an optimizer of type OneBitAdam".to_owned(),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Way::Plain => "as it is",
            Way::Int8Weights => "int8 weights",
            Way::NearWeights => "weights kept on the host",
            Way::Int4Gradients => "int4 gradients",
            Way::AllOfZeroPlusPlus => "all of ZeRO++",
            Way::OneBit => "1-bit after the freeze",
        })
    }
}

impl fmt::Display for Crossings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<25} {:>12}", format!("a host of {} sends", self.hosts), "per step")?;
        let configured = human(self.configured.sent_bytes);
        writeln!(f, "{:<25} {configured:>12}  as configured", self.configured.way)?;
        for other in &self.others {
            writeln!(f, "{:<25} {:>12}", other.way, human(other.sent_bytes))?;
        }
        if self.routed_bytes > 0 {
            writeln!(f, "{:<25} {:>12}  of each, to experts and back", "tokens", human(self.routed_bytes))?;
        }
        self.advice.iter().try_for_each(|advice| writeln!(f, "{advice}"))
    }
}
