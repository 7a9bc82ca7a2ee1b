//! Rotary position embedding: frequencies, their scaling variants, and the tables that kernels read.

use std::sync::Arc;

use ferrospeed_tensor::ops::Turn;
use ferrospeed_tensor::{Device, Result, Tensor};

/// How frequencies are stretched for sequences longer than the model was trained on.
#[derive(Debug, Clone, PartialEq)]
pub enum RotaryScaling {
    /// Not at all.
    None,
    /// Positions are divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// The base grows with the length once it exceeds `trained`. (NTK-aware.)
    Dynamic {
        /// How strongly.
        factor: f64,
        /// The length the model was trained on.
        trained: usize,
    },
    /// LLaMA 3.1: low frequencies are stretched, high ones kept, those between interpolated.
    Llama3 {
        /// The stretch of low frequencies.
        factor: f64,
        /// Wavelengths above `trained / low` are stretched.
        low: f64,
        /// Wavelengths below `trained / high` are kept.
        high: f64,
        /// The length the model was first trained on.
        trained: usize,
    },
    /// YaRN: pairs that turn seldom within the trained length are stretched, those that turn often kept, those between
    /// interpolated, and all are amplified. (Peng, Quesnelle, Fan, Shippole: "YaRN", 2024, section 3.)
    Yarn {
        /// The stretch.
        factor: f64,
        /// Pairs that turn more often than this are kept.
        fast: f64,
        /// Pairs that turn less often than this are stretched.
        slow: f64,
        /// Whether the two borders are rounded outwards to whole pairs.
        whole_pairs: bool,
        /// The length the model was first trained on.
        trained: usize,
        /// Multiplies cosines and sines, and so scales scores by its square.
        amplitude: f64,
    },
    /// LongRoPE: every pair has a divisor of its own, and another one in texts that are longer than `trained`. (Ding et al.:
    /// "LongRoPE", 2024.)
    LongRope {
        /// Divisors in texts up to `trained`, one for each pair.
        short: Arc<[f64]>,
        /// Divisors in longer ones.
        long: Arc<[f64]>,
        /// The length the model was first trained on.
        trained: usize,
        /// Multiplies cosines and sines.
        amplitude: f64,
    },
}

/// The rotary embedding of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    /// How many channels of each head turn.
    pub dims: usize,
    /// The base of the frequencies.
    pub theta: f64,
    /// How they are stretched.
    pub scaling: RotaryScaling,
    /// Whether pairs are neighbours (2i, 2i+1) rather than halves (i, i + dims/2).
    pub interleaved: bool,
}

/// How queries grow with their place, so that they go on telling keys apart in long texts: by `1 + growth·ln(1 + ⌊p/trained⌋)`.
/// (Nakanishi: "Scalable-Softmax is superior for attention", 2025.)
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// How strongly.
    pub growth: f64,
    /// The length the model was first trained on, up to which queries are as they are.
    pub trained: usize,
}

impl QueryGrowth {
    fn at(&self, position: usize) -> f64 {
        1.0 + self.growth * ((position / self.trained.max(1)) as f64).ln_1p()
    }
}

/// Cosines and sines `[batch or 1, tokens, dims/2]`.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    /// Those of queries, where they are longer than those of keys.
    of_queries: Option<[Tensor; 2]>,
}

impl Rotary {
    /// The angle per position of each pair, for sequences of `length` tokens.
    pub fn frequencies(&self, length: usize) -> Vec<f64> {
        let dims = self.dims as f64;
        let theta = match &self.scaling {
            &RotaryScaling::Dynamic { factor, trained } if length > trained => {
                let growth = factor * length as f64 / trained as f64 - (factor - 1.0);
                self.theta * growth.powf(dims / (dims - 2.0))
            }
            _ => self.theta,
        };
        (0..self.dims / 2)
            .map(|pair| {
                let frequency = theta.powf(-2.0 * pair as f64 / dims);
                match &self.scaling {
                    RotaryScaling::Linear { factor } => frequency / factor,
                    &RotaryScaling::Llama3 { factor, low, high, trained } => {
                        let trained = trained as f64;
                        let wavelength = std::f64::consts::TAU / frequency;
                        if wavelength < trained / high {
                            frequency
                        } else if wavelength > trained / low {
                            frequency / factor
                        } else {
                            let smooth = (trained / wavelength - low) / (high - low);
                            (1.0 - smooth) * frequency / factor + smooth * frequency
                        }
                    }
                    RotaryScaling::Yarn { factor, .. } => {
                        let [kept, stretched] = self.yarn_borders();
                        let share = ((pair as f64 - kept) / (stretched - kept)).clamp(0.0, 1.0);
                        frequency * (1.0 - share + share / factor)
                    }
                    RotaryScaling::LongRope { short, long, trained, .. } => {
                        let divisors = if length > *trained { long } else { short };
                        frequency / divisors.get(pair).copied().unwrap_or(1.0)
                    }
                    RotaryScaling::None | RotaryScaling::Dynamic { .. } => frequency,
                }
            })
            .collect()
    }

    /// The length up to which frequencies are the same, where they change with a text's length.
    pub fn steady_length(&self) -> Option<usize> {
        match &self.scaling {
            RotaryScaling::Dynamic { trained, .. } | RotaryScaling::LongRope { trained, .. } => {
                Some(*trained)
            }
            _ => None,
        }
    }

    /// Whether keys of the first `before` tokens are of no use to a text of `after`: all frequencies change at once between the
    /// two. Where they change little by little, decoders live with older keys.
    pub fn turns_anew(&self, before: usize, after: usize) -> bool {
        match &self.scaling {
            RotaryScaling::LongRope { trained, .. } => (1..=*trained).contains(&before) && after > *trained,
            _ => false,
        }
    }

    /// The pair up to which frequencies are kept, and the one from which they are stretched.
    fn yarn_borders(&self) -> [f64; 2] {
        let RotaryScaling::Yarn { fast, slow, whole_pairs, trained, .. } = self.scaling else {
            return [0.0, 1.0];
        };
        let dims = self.dims as f64;
        // The pair that turns `turns` times within the trained length.
        let pair = |turns: f64| {
            dims * (trained as f64 / (turns * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
        };
        let (kept, stretched) = (pair(fast), pair(slow));
        let (kept, stretched) =
            if whole_pairs { (kept.floor(), stretched.ceil()) } else { (kept, stretched) };
        let (kept, stretched) = (kept.max(0.0), stretched.min(dims - 1.0));
        [kept, if kept == stretched { stretched + 0.001 } else { stretched }]
    }

    /// What cosines and sines are multiplied by.
    fn amplitude(&self) -> f64 {
        match self.scaling {
            RotaryScaling::Yarn { amplitude, .. } | RotaryScaling::LongRope { amplitude, .. } => amplitude,
            _ => 1.0,
        }
    }

    /// The table for these positions: one row of positions per sequence, or one for all.
    pub fn table(&self, positions: &[Vec<usize>], length: usize, device: &Device) -> Result<RotaryTable> {
        let (frequencies, amplitude) = (self.frequencies(length), self.amplitude());
        let (tokens, pairs) = (positions.first().map_or(0, Vec::len), frequencies.len());
        let shape = [positions.len(), tokens, pairs];
        let all = || positions.iter().flatten().copied();
        let row = |position: usize, f: fn(f64) -> f64| {
            frequencies.iter().map(move |frequency| (amplitude * f(position as f64 * frequency)) as f32)
        };
        // Many tokens stand at the same few positions where documents share rows: those are computed once.
        let distinct = all().max().map_or(0, |last| last + 1);
        let tensor = |f: fn(f64) -> f64| {
            let values: Vec<f32> = if distinct < positions.len() * tokens {
                let once: Vec<f32> = (0..distinct).flat_map(|position| row(position, f)).collect();
                all().flat_map(|position| &once[position * pairs..(position + 1) * pairs]).copied().collect()
            } else {
                all().flat_map(|position| row(position, f)).collect()
            };
            Tensor::from_slice(&values, shape, device)
        };
        Ok(RotaryTable {
            cos: tensor(f64::cos)?,
            sin: tensor(f64::sin)?,
            interleaved: self.interleaved,
            of_queries: None,
        })
    }

    /// The same whose queries grow with their place, where all channels of a head turn.
    pub fn table_with_growth(
        &self,
        positions: &[Vec<usize>],
        length: usize,
        growth: Option<&QueryGrowth>,
        device: &Device,
    ) -> Result<RotaryTable> {
        let table = self.table(positions, length, device)?;
        let Some(growth) = growth else { return Ok(table) };
        let factors: Vec<f32> =
            positions.iter().flatten().map(|&position| growth.at(position) as f32).collect();
        let rows = [positions.len(), positions.first().map_or(0, Vec::len), 1];
        let factors = Tensor::from_slice(&factors, rows, device)?;
        let grown = |table: &Tensor| ferrospeed_tensor::ops::mul(table, &factors);
        let of_queries = Some([grown(&table.cos)?, grown(&table.sin)?]);
        Ok(RotaryTable { of_queries, ..table })
    }
}

impl RotaryTable {
    /// The one row at `place`, an `I64` in the device's memory.
    pub fn at(&self, place: &Tensor) -> Result<RotaryTable> {
        self.each(|table| ferrospeed_tensor::ops::index_select(table, 1, place))
    }

    /// Those of some tokens, as many of each sequence: `places` in one sequence, `rows` among the tokens of all.
    pub(crate) fn of_tokens(&self, places: &Tensor, rows: &Tensor, batch: usize) -> Result<RotaryTable> {
        let select = |table: &Tensor| {
            let [sequences, tokens, pairs] = [0, 1, 2].map(|dim| table.shape().sizes()[dim]);
            let flat = ferrospeed_tensor::ops::reshape(table, [sequences * tokens, pairs])?;
            let chosen = if sequences == 1 { places } else { rows };
            let taken = ferrospeed_tensor::ops::index_select(&flat, 0, chosen)?;
            ferrospeed_tensor::ops::reshape(&taken, [batch, chosen.numel() / batch, pairs])
        };
        self.each(select)
    }

    /// The same of other rows.
    fn each(&self, rows: impl Fn(&Tensor) -> Result<Tensor>) -> Result<RotaryTable> {
        let of_queries = match &self.of_queries {
            Some([cos, sin]) => Some([rows(cos)?, rows(sin)?]),
            None => None,
        };
        Ok(RotaryTable {
            cos: rows(&self.cos)?,
            sin: rows(&self.sin)?,
            interleaved: self.interleaved,
            of_queries,
        })
    }

    /// For ops that turn queries and keys alike on their way; `None` where they do not turn alike.
    pub(crate) fn turn(&self) -> Option<Turn<'_>> {
        let alike = self.of_queries.is_none();
        alike.then_some(Turn { cos: &self.cos, sin: &self.sin, interleaved: self.interleaved })
    }

    /// Turns keys `[batch, tokens, heads, dim]`, where they lie if nobody else sees them.
    pub fn rotate(&self, x: Tensor) -> Result<Tensor> {
        ferrospeed_tensor::ops::rotary(x, &self.cos, &self.sin, self.interleaved)
    }

    /// The same of queries.
    pub fn rotate_queries(&self, x: Tensor) -> Result<Tensor> {
        match &self.of_queries {
            Some([cos, sin]) => ferrospeed_tensor::ops::rotary(x, cos, sin, self.interleaved),
            None => self.rotate(x),
        }
    }
}
