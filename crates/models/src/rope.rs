//! Rotary positions as a `config.json` describes them.
//!
//! Up to transformers 4 the fields stand side by side (`rope_theta`, `rope_scaling`, for GPT-NeoX `rotary_emb_base` and
//! `rotary_pct`); from 5 on they are one object, `rope_parameters`, or one for each type of layer. Both are read, and a
//! directory that is written keeps the spelling it came with. A kind of scaling that is not implemented is refused.

use ferrospeed_nn::{Rotary, RotaryScaling};

use crate::error::{ModelError, Result};
use crate::fields::Fields;

/// What the object may be keyed by instead, one object for each.
const LAYER_TYPES: [&str; 3] = ["full_attention", "sliding_attention", "chunked_attention"];

/// How a family speaks of rotary positions outside `rope_parameters`, and what it takes for granted.
#[derive(Clone, Copy)]
pub(crate) struct RotaryDefaults {
    /// The field with the base of the frequencies.
    pub(crate) theta_key: &'static str,
    pub(crate) theta: f64,
    /// The field with the share of each head's channels that turn, and its default; `None` where all of them do.
    pub(crate) share: Option<(&'static str, f64)>,
    /// The length the model was first trained on; the longest that it takes when absent.
    pub(crate) trained: Option<usize>,
    /// What the family reads of the object itself.
    pub(crate) own: &'static [&'static str],
}

/// How strongly queries grow with their place.
pub(crate) const QUERY_GROWTH: &str = "llama_4_scaling_beta";

/// The rotary positions of heads of `head_dim` channels.
pub(crate) fn rotary(fields: &Fields<'_>, head_dim: usize, defaults: &RotaryDefaults) -> Result<Rotary> {
    let (new, old) = (fields.object("rope_parameters")?, fields.object("rope_scaling")?);
    if new.is_some() && old.is_some() && fields.get("rope_parameters") != fields.get("rope_scaling") {
        let why =
            "stands beside rope_parameters, which means the same and says something else; keep one of them";
        return Err(fields.error("rope_scaling", why));
    }
    let reader = Reader { fields, head_dim, defaults };
    let Some(said) = new.or(old) else { return reader.rotary(None) };
    let keyed: Vec<&str> = said.keys().filter(|key| LAYER_TYPES.contains(key)).collect();
    let Some(first) = keyed.first() else { return reader.finished(&said) };
    let mut each = Vec::new();
    for key in &keyed {
        if let Some(of_type) = said.object(key)? {
            each.push(reader.finished(&of_type)?);
        }
    }
    said.finish()?;
    match each.windows(2).position(|pair| pair[0] != pair[1]) {
        None => each.pop().ok_or_else(|| said.error(first, "is no object")),
        Some(place) => {
            let why = format!("differs from {}; one description for all layers is supported", keyed[place]);
            Err(said.error(keyed[place + 1], why))
        }
    }
}

/// The rotary positions of layers that see all and of those that slide, where the two turn otherwise. Up to transformers 4 they
/// stand side by side, and scaling is that of layers that see all.
pub(crate) fn rotary_by_type(
    fields: &Fields<'_>,
    head_dim: usize,
    all: &RotaryDefaults,
    sliding: &RotaryDefaults,
) -> Result<[Rotary; 2]> {
    let [all, sliding] = [all, sliding].map(|defaults| Reader { fields, head_dim, defaults });
    let (new, old) = (fields.object("rope_parameters")?, fields.object("rope_scaling")?);
    let Some(said) = new else {
        let all = match old {
            Some(old) => all.finished(&old)?,
            None => all.rotary(None)?,
        };
        return Ok([all, sliding.rotary(None)?]);
    };
    if old.is_some() {
        let why = "stands beside rope_parameters, which has one description for each type of layer; keep one of them";
        return Err(fields.error("rope_scaling", why));
    }
    let of_type = |reader: &Reader<'_, '_>, key: &str| match said.object(key)? {
        Some(of_type) => reader.finished(&of_type),
        None => reader.rotary(None),
    };
    let both = [of_type(&all, "full_attention")?, of_type(&sliding, "sliding_attention")?];
    said.finish()?;
    Ok(both)
}

struct Reader<'a, 'b> {
    fields: &'a Fields<'b>,
    head_dim: usize,
    defaults: &'a RotaryDefaults,
}

impl Reader<'_, '_> {
    fn finished(&self, said: &Fields<'_>) -> Result<Rotary> {
        let rotary = self.rotary(Some(said))?;
        said.harmless(self.defaults.own);
        said.finish()?;
        Ok(rotary)
    }

    fn rotary(&self, said: Option<&Fields<'_>>) -> Result<Rotary> {
        let within = |key: &str| said.map_or(Ok(None), |said| said.optional_number(key));
        let beside = self.fields.number(self.defaults.theta_key, Some(self.defaults.theta))?;
        let theta = within("rope_theta")?.unwrap_or(beside);
        if !(theta.is_finite() && theta > 0.0) {
            return Err(self
                .fields
                .error(self.defaults.theta_key, format!("{theta} is no base of frequencies")));
        }
        let dims = self.dims(within("partial_rotary_factor")?)?;
        let scaling = said.map_or(Ok(RotaryScaling::None), |said| self.scaling(said, dims / 2))?;
        Ok(Rotary { dims, theta, scaling, interleaved: false })
    }

    /// How many channels of a head turn.
    fn dims(&self, within: Option<f64>) -> Result<usize> {
        let (key, share) = match self.defaults.share {
            Some((key, default)) => (key, within.unwrap_or(self.fields.number(key, Some(default))?)),
            None => {
                let key = "partial_rotary_factor";
                (key, within.unwrap_or(self.fields.number(key, Some(1.0))?))
            }
        };
        if self.defaults.share.is_none() && share != 1.0 {
            let why = format!("{share} is not supported: all channels of this family's heads turn");
            return Err(self.fields.error(key, why));
        }
        let dims = (self.head_dim as f64 * share) as usize;
        if dims == 0 || !dims.is_multiple_of(2) || dims > self.head_dim {
            let why = format!("{dims} rotary channels of {} cannot be paired", self.head_dim);
            return Err(ModelError::config("rope", why));
        }
        Ok(dims)
    }

    fn scaling(&self, said: &Fields<'_>, pairs: usize) -> Result<RotaryScaling> {
        // Some releases write the kind under both names.
        let older = said.string("type", Some("default"))?;
        let name = said.string("rope_type", Some(&older))?;
        let key = if said.has("rope_type") { "rope_type" } else { "type" };
        if said.has("rope_type") && said.has("type") && older != name {
            return Err(said.error("type", format!("'{older}' contradicts rope_type '{name}'")));
        }
        let positive = |key: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(value),
            false => Err(said.error(key, format!("{value} is not a number above 0"))),
        };
        let number = |key: &str| positive(key, said.number(key, None)?);
        Ok(match name.as_str() {
            "default" => RotaryScaling::None,
            "linear" => RotaryScaling::Linear { factor: number("factor")? },
            "dynamic" => RotaryScaling::Dynamic { factor: number("factor")?, trained: self.longest()? },
            "llama3" => RotaryScaling::Llama3 {
                factor: number("factor")?,
                low: number("low_freq_factor")?,
                high: number("high_freq_factor")?,
                trained: self.trained(said)?,
            },
            "yarn" => {
                // Whether the model was trained so; it is computed so anyway.
                said.harmless(&["finetuned"]);
                let trained = self.trained(said)?;
                let factor = match said.optional_number("factor")? {
                    Some(factor) => positive("factor", factor)?,
                    None => self.longest()? as f64 / trained as f64,
                };
                let grown = |times: f64| if factor <= 1.0 { 1.0 } else { 0.1 * times * factor.ln() + 1.0 };
                let scales = (said.optional_number("mscale")?, said.optional_number("mscale_all_dim")?);
                let amplitude = match (said.optional_number("attention_factor")?, scales) {
                    (Some(amplitude), _) => amplitude,
                    (None, (Some(one), Some(all))) if one != 0.0 && all != 0.0 => grown(one) / grown(all),
                    (None, _) => grown(1.0),
                };
                RotaryScaling::Yarn {
                    factor,
                    fast: positive("beta_fast", said.number("beta_fast", Some(32.0))?)?,
                    slow: positive("beta_slow", said.number("beta_slow", Some(1.0))?)?,
                    whole_pairs: said.flag("truncate", true)?,
                    trained,
                    amplitude: positive("attention_factor", amplitude)?,
                }
            }
            // The first files of Phi-3 call it so.
            "longrope" | "su" => self.longrope(said, pairs)?,
            other => {
                let why = format!(
                    "'{other}' is not supported; default, linear, dynamic, llama3, yarn and longrope are"
                );
                return Err(said.error(key, why));
            }
        })
    }

    fn longrope(&self, said: &Fields<'_>, pairs: usize) -> Result<RotaryScaling> {
        let divisors = |key: &str| {
            let all = said.numbers(key)?;
            if all.len() != pairs {
                return Err(said.error(key, format!("lists {} pairs, heads have {pairs}", all.len())));
            }
            match all.iter().find(|divisor| !(divisor.is_finite() && **divisor > 0.0)) {
                Some(divisor) => Err(said.error(key, format!("{divisor} is not a number above 0"))),
                None => Ok(all.into()),
            }
        };
        let trained = self.trained(said)?;
        let factor = match said.optional_number("factor")? {
            Some(factor) => factor,
            None => self.longest()? as f64 / trained as f64,
        };
        let usual = if factor > 1.0 { (1.0 + factor.ln() / (trained as f64).ln()).sqrt() } else { 1.0 };
        let amplitude = said.number("attention_factor", Some(usual))?;
        if !(amplitude.is_finite() && amplitude > 0.0) {
            return Err(said.error("attention_factor", format!("{amplitude} is not a number above 0")));
        }
        let (short, long) = (divisors("short_factor")?, divisors("long_factor")?);
        Ok(RotaryScaling::LongRope { short, long, trained, amplitude })
    }

    fn longest(&self) -> Result<usize> {
        self.fields.size("max_position_embeddings", None)
    }

    /// The length the model was first trained on.
    fn trained(&self, said: &Fields<'_>) -> Result<usize> {
        const KEY: &str = "original_max_position_embeddings";
        let within = said.optional_size(KEY)?;
        match self.fields.optional_size(KEY)?.or(within) {
            Some(0) => Err(said.error(KEY, "0 is no length")),
            Some(trained) => Ok(trained),
            None => self.defaults.trained.map_or_else(|| self.longest(), Ok),
        }
    }
}
