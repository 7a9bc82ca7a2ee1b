//! What the text endpoints share: how tokens are chosen, how many answers, when they end.

use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use super::fault::Fault;
use super::fields::Fields;
use super::{App, unforeseen};
use crate::constrain::Constraint;
use crate::request::{Request, Special, Work};
use crate::sampling::SamplingOptions;

/// Answers to one prompt.
const MAX_ANSWERS: i64 = 16;
/// Stop strings of a request, and bytes of each.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
const MAX_BIASES: usize = 1024;

/// What was asked for, beside the prompt.
pub(super) struct Parameters {
    pub(super) answers: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    max_tokens: Option<usize>,
    sampling: SamplingOptions,
    pub(super) stops: Vec<String>,
    stop_tokens: Vec<i64>,
    /// Whether the text is to show tokens that have a meaning of their own.
    pub(super) special: Special,
}

impl Parameters {
    /// Reads them; `default_tokens` is the length of an answer where nothing is said.
    pub(super) fn read(
        fields: &mut Fields,
        app: &App,
        default_tokens: Option<usize>,
    ) -> Result<Parameters, Fault> {
        let facts = app.facts();
        served(app, fields)?;
        let longest = facts.longest as i64;
        // A text may be asked for as it is: with `echo`, and how likely it is.
        let least = i64::from(default_tokens.is_none());
        let newer = fields.whole("max_completion_tokens", least..=longest)?;
        let older = fields.whole("max_tokens", least..=longest)?;
        if let (Some(newer), Some(older)) = (newer, older)
            && newer != older
        {
            let why =
                format!("is the old name of max_completion_tokens, and says {older} where that says {newer}");
            return Err(Fault::field("max_tokens", why));
        }
        let answers = fields.whole("n", 1..=MAX_ANSWERS)?.unwrap_or(1) as usize;
        let best_of = fields.whole("best_of", 1..=MAX_ANSWERS)?.map_or(answers, |best_of| best_of as usize);
        if best_of != answers {
            return Err(Fault::field("best_of", "is not supported unless it equals n"));
        }
        let stream = fields.flag("stream")?;
        let options = fields.take("stream_options");
        if options.is_some() && !stream {
            return Err(Fault::field("stream_options", "is for stream: true alone"));
        }
        let include_usage = match options.as_ref().map(|options| &options["include_usage"]) {
            None | Some(Value::Null) => false,
            Some(Value::Bool(include)) => *include,
            Some(_) => return Err(Fault::field("stream_options.include_usage", "must be true or false")),
        };
        let mut stop_tokens = token_list(fields, "stop_token_ids", facts.vocabulary)?;
        if !fields.flag("ignore_eos")? {
            stop_tokens.extend(&facts.end_tokens);
        }
        Ok(Parameters {
            answers,
            stream,
            include_usage,
            max_tokens: newer.or(older).map(|tokens| tokens as usize).or(default_tokens),
            sampling: sampling(fields, facts.vocabulary)?,
            stops: stops(fields)?,
            stop_tokens,
            special: Special::Hidden,
        })
    }

    /// Has every answer keep to a form.
    pub(super) fn constrain(&mut self, constraint: Option<Constraint>) {
        self.sampling.constraint = constraint.map(Arc::new);
    }

    /// Whether nothing is to be written.
    pub(super) fn writes_nothing(&self) -> bool {
        self.max_tokens == Some(0)
    }

    /// The request that asks how likely a prompt is, and for `alternatives` to each of its tokens.
    pub(super) fn score(app: &App, prompt: Vec<i64>, first_answer: usize, alternatives: usize) -> Request {
        let deadline = Instant::now() + app.options.request_time;
        Request { prompt, work: Work::Score { from: 1, alternatives }, first_answer, deadline }
    }

    /// The request for one prompt; `logprobs` is how many alternatives are told.
    pub(super) fn request(
        &self,
        app: &App,
        prompt: Vec<i64>,
        first_answer: usize,
        logprobs: Option<usize>,
    ) -> Request {
        let answer = |stream| SamplingOptions { logprobs, stream, ..self.sampling.clone() };
        Request {
            prompt,
            work: Work::Generate {
                answers: (0..self.answers as u32).map(|index| answer(first_answer as u32 + index)).collect(),
                max_tokens: self.max_tokens,
                stops: self.stops.clone(),
                stop_tokens: self.stop_tokens.clone(),
                special: self.special,
            },
            first_answer,
            deadline: Instant::now() + app.options.request_time,
        }
    }
}

/// Refuses another model's name.
pub(super) fn served(app: &App, fields: &mut Fields) -> Result<(), Fault> {
    let served = &app.facts().name;
    match fields.text("model")? {
        Some(asked) if asked != *served => Err(Fault::no_model(&asked, served)),
        _ => Ok(()),
    }
}

fn sampling(fields: &mut Fields, vocabulary: usize) -> Result<SamplingOptions, Fault> {
    let top_k = fields.whole("top_k", -1..=i64::from(u32::MAX))?.filter(|&count| count > 0);
    let seed = fields.whole("seed", i64::MIN..=i64::MAX)?;
    let speculate = match fields.take("speculate") {
        None | Some(Value::Bool(true)) => true,
        Some(Value::Bool(false)) => false,
        Some(_) => return Err(Fault::field("speculate", "must be true or false")),
    };
    let mut number = |name: &str, from: f64, to: f64, usual: f32| -> Result<f32, Fault> {
        Ok(fields.number(name, from..=to)?.unwrap_or(usual))
    };
    let options = SamplingOptions {
        temperature: number("temperature", 0.0, 2.0, 1.0)?,
        top_p: number("top_p", 0.0, 1.0, 1.0)?,
        min_p: number("min_p", 0.0, 1.0, 0.0)?,
        presence_penalty: number("presence_penalty", -2.0, 2.0, 0.0)?,
        frequency_penalty: number("frequency_penalty", -2.0, 2.0, 0.0)?,
        repetition_penalty: number("repetition_penalty", 0.01, 10.0, 1.0)?,
        top_k: top_k.map(|count| count as usize),
        seed: seed.map_or_else(unforeseen, |seed| seed as u64),
        speculate,
        ..Default::default()
    };
    Ok(SamplingOptions { bias: biases(fields, vocabulary)?, ..options })
}

fn biases(fields: &mut Fields, vocabulary: usize) -> Result<Vec<(i64, f32)>, Fault> {
    const NAME: &str = "logit_bias";
    let Some(value) = fields.take(NAME) else { return Ok(Vec::new()) };
    let Value::Object(entries) = value else {
        return Err(Fault::field(NAME, "must be an object of token numbers and biases"));
    };
    if entries.len() > MAX_BIASES {
        return Err(Fault::field(NAME, format!("has more than {MAX_BIASES} entries")));
    }
    let entry = |(token, bias): (&String, &Value)| {
        let token = token.parse().ok().filter(|token| (0..vocabulary as i64).contains(token))?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias))?;
        Some((token, bias as f32))
    };
    let why = || Fault::field(NAME, format!("must give tokens below {vocabulary} biases from -100 to 100"));
    entries.iter().map(entry).collect::<Option<_>>().ok_or_else(why)
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, Fault> {
    const NAME: &str = "stop";
    let texts: Option<Vec<String>> = match fields.take(NAME) {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => Some(vec![text]),
        Some(Value::Array(texts)) => texts.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        Some(_) => None,
    };
    let fits = |texts: &Vec<String>| {
        texts.len() <= MAX_STOPS && texts.iter().all(|text| (1..=MAX_STOP_BYTES).contains(&text.len()))
    };
    texts.filter(fits).ok_or_else(|| {
        Fault::field(
            NAME,
            format!("must be a string or up to {MAX_STOPS} of them, of 1 to {MAX_STOP_BYTES} bytes"),
        )
    })
}

/// A list of tokens that the model knows.
pub(super) fn tokens(value: &[Value], vocabulary: usize) -> Option<Vec<i64>> {
    value.iter().map(|token| token.as_i64().filter(|token| (0..vocabulary as i64).contains(token))).collect()
}

fn token_list(fields: &mut Fields, name: &str, vocabulary: usize) -> Result<Vec<i64>, Fault> {
    let found = match fields.take(name) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_BIASES => tokens(&list, vocabulary),
        Some(_) => None,
    };
    found.ok_or_else(|| Fault::field(name, format!("must be a list of tokens below {vocabulary}")))
}
