//! What hosts send each other in a step, and what would make it less.
//!
//! A host's link is where ranks wait, so bytes are those that one host of several, with as many ranks each, sends: the one
//! that sends most. A gather brings every host's part to the others. A reduction sends every rank's values to their owners,
//! or one accumulator from host to host where that is less. Integers are counted with their steps; small messages (norms,
//! agreements) and what ranks of one host say to each other are not.

use std::fmt;

use ferrospeed_config::{Config, DataType, Optimizer, Stage};

use crate::plan::{Request, human};

/// Bytes that travel with each value of a quantised weight, its part of a step included, and of a gradient.
const INT8: f64 = 1.0 + 4.0 / 2048.0;
const INT4: f64 = 0.5 + 4.0 / 512.0;
/// Bits of a byte: signs in it.
const SIGNS: f64 = 8.0;
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
    /// What to do, where that sends at most half.
    pub advice: Option<String>,
}

/// What hosts of so many ranks send; `None` where there is one.
pub fn crossings(request: &Request<'_>, ranks_per_host: u64) -> Option<Crossings> {
    let ranks_per_host = ranks_per_host.max(1);
    let hosts = request.data_parallel_size.div_ceil(ranks_per_host);
    if hosts < 2 {
        return None;
    }
    let link = Link { request, hosts: hosts as f64, ranks: ranks_per_host as f64 };
    let zero = &request.config.zero;
    let switches = Switches {
        weights: zero.quantized_weights,
        near: zero.hpz_partition_size > 1,
        gradients: zero.quantized_gradients,
    };
    let stage_3 = zero.stage == Stage::Parameters;
    let configured = match is_one_bit(request.config) {
        true => Crossing { way: Way::OneBit, sent_bytes: link.one_bit() },
        false if stage_3 => Crossing { way: switches.way(), sent_bytes: link.stage_3(switches) },
        false => Crossing { way: Way::Plain, sent_bytes: link.replicated() },
    };
    let mut others = Vec::new();
    if stage_3 {
        let of = |switches: Switches| Crossing { way: switches.way(), sent_bytes: link.stage_3(switches) };
        others.extend(Switches::EACH.map(of));
    } else {
        others.push(Crossing { way: Way::Plain, sent_bytes: link.replicated() });
        others.push(Crossing { way: Way::OneBit, sent_bytes: link.one_bit() });
    }
    others.retain(|other| other.way != configured.way);
    let least = others.iter().min_by_key(|other| other.sent_bytes);
    let least = least.filter(|least| least.sent_bytes.saturating_mul(2) <= configured.sent_bytes);
    let advice = least.map(|least| {
        let share = 100.0 * least.sent_bytes as f64 / configured.sent_bytes.max(1) as f64;
        format!("{} sends {share:.0} % of that: {}", least.way, least.way.how(ranks_per_host))
    });
    Some(Crossings { hosts, configured, others, advice })
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
    const EACH: [Switches; 5] = [
        Switches::NONE,
        Switches { weights: true, ..Switches::NONE },
        Switches { near: true, ..Switches::NONE },
        Switches { gradients: true, ..Switches::NONE },
        Switches { weights: true, near: true, gradients: true },
    ];

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

struct Link<'a> {
    request: &'a Request<'a>,
    hosts: f64,
    ranks: f64,
}

impl Link<'_> {
    fn params(&self) -> f64 {
        self.request.model.size().total_params as f64
    }

    /// What is not a host's own.
    fn away(&self) -> f64 {
        (self.hosts - 1.0) / self.hosts
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

    /// The share of parameters that backward gathers again: not what stays from forward.
    fn gathered_again(&self) -> f64 {
        let zero = &self.request.config.zero;
        let stays =
            (zero.max_reuse_distance as f64 / 2.0).min(zero.max_live_parameters as f64) / self.params();
        1.0 - stays.min(1.0)
    }

    fn reduce_scatter(&self) -> f64 {
        let direct = self.ranks * self.gradient_width() * self.away();
        let handed_on = if self.ranks > 1.0 { ACCUMULATOR } else { f64::INFINITY };
        self.params() * direct.min(handed_on)
    }

    fn stage_3(&self, switches: Switches) -> u64 {
        let micro_batches = self.micro_batches();
        let width = if switches.weights { INT8 } else { self.width() };
        // Neighbours have everything among themselves until weights change.
        let gathers = if switches.near { 1.0 } else { micro_batches * (1.0 + self.gathered_again()) };
        let weights = self.params() * width * self.away() * gathers;
        let gradients = match switches.gradients {
            true => self.params() * INT4 * self.away(),
            false => self.reduce_scatter(),
        };
        (weights + gradients * micro_batches) as u64
    }

    /// Stages 0 to 2.
    fn replicated(&self) -> u64 {
        let config = self.request.config;
        let gather = self.params() * self.width() * self.away();
        let bytes = match config.zero.stage {
            // Sums go from host to host, and their result back.
            Stage::Off if self.ranks > 1.0 => {
                let back = if self.hosts > 2.0 { self.gradient_width() } else { 0.0 };
                self.params() * (ACCUMULATOR + back)
            }
            Stage::Off => self.params() * 2.0 * self.gradient_width() * self.away(),
            Stage::Gradients => self.reduce_scatter() * self.micro_batches() + gather,
            _ => self.reduce_scatter() + gather,
        };
        bytes as u64
    }

    fn one_bit(&self) -> u64 {
        // Every rank's signs go to their owners, and the owners' signs to every host.
        (self.params() / SIGNS * (self.ranks + 1.0) * self.away()) as u64
    }
}

impl Way {
    /// How it is asked for.
    fn how(self, ranks_per_host: u64) -> String {
        let near = format!("\"zero_hpz_partition_size\": {ranks_per_host}");
        match self {
            Way::Plain => "remove what is set".to_owned(),
            Way::Int8Weights => "\"zero_quantized_weights\": true".to_owned(),
            Way::NearWeights => near,
            Way::Int4Gradients => "\"zero_quantized_gradients\": true".to_owned(),
            Way::AllOfZeroPlusPlus => {
                format!("\"zero_quantized_weights\": true, {near}, \"zero_quantized_gradients\": true")
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
        self.advice.iter().try_for_each(|advice| writeln!(f, "{advice}"))
    }
}
