//! Rotary position embedding: frequencies, their scaling variants, and the tables that kernels read.

use ferrospeed_tensor::{Device, Result, Tensor};

/// How frequencies are stretched for sequences longer than the model was trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
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
}

/// The rotary embedding of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
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

/// Cosines and sines `[batch or 1, tokens, dims/2]`.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
}

impl Rotary {
    /// The angle per position of each pair, for sequences of `length` tokens.
    pub fn frequencies(&self, length: usize) -> Vec<f64> {
        let dims = self.dims as f64;
        let theta = match self.scaling {
            RotaryScaling::Dynamic { factor, trained } if length > trained => {
                let growth = factor * length as f64 / trained as f64 - (factor - 1.0);
                self.theta * growth.powf(dims / (dims - 2.0))
            }
            _ => self.theta,
        };
        (0..self.dims / 2)
            .map(|pair| {
                let frequency = theta.powf(-2.0 * pair as f64 / dims);
                match self.scaling {
                    RotaryScaling::Linear { factor } => frequency / factor,
                    RotaryScaling::Llama3 { factor, low, high, trained } => {
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
                    RotaryScaling::None | RotaryScaling::Dynamic { .. } => frequency,
                }
            })
            .collect()
    }

    /// The table for these positions: one row of positions per sequence, or one for all.
    pub fn table(&self, positions: &[Vec<usize>], length: usize, device: &Device) -> Result<RotaryTable> {
        let frequencies = self.frequencies(length);
        let tokens = positions.first().map_or(0, Vec::len);
        let angles: Vec<f64> = positions
            .iter()
            .flatten()
            .flat_map(|&position| frequencies.iter().map(move |frequency| position as f64 * frequency))
            .collect();
        let shape = [positions.len(), tokens, frequencies.len()];
        let tensor = |f: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|&angle| f(angle) as f32).collect();
            Tensor::from_slice(&values, shape, device)
        };
        Ok(RotaryTable { cos: tensor(f64::cos)?, sin: tensor(f64::sin)?, interleaved: self.interleaved })
    }
}

impl RotaryTable {
    /// The one row at `place`, an `I64` in the device's memory.
    pub fn at(&self, place: &Tensor) -> Result<RotaryTable> {
        let row = |table: &Tensor| ferrospeed_tensor::ops::index_select(table, 1, place);
        Ok(RotaryTable { cos: row(&self.cos)?, sin: row(&self.sin)?, interleaved: self.interleaved })
    }

    /// Turns `x [batch, tokens, heads, dim]`.
    pub fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        ferrospeed_tensor::ops::rotary(x, &self.cos, &self.sin, self.interleaved)
    }
}
