//! A request's body, read field by field: what is not understood is refused by name, never dropped.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use ferrospeed_models::json;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use super::fault::Fault;
use super::room::Place;

/// Time for a client to send its body.
const BODY_TIME: Duration = Duration::from_secs(30);

/// A body of so many bytes is read at once.
const SMALL_BODY: usize = 1 << 16;
/// Turns of those that are larger.
static LARGE_BODIES: Semaphore = Semaphore::const_new(2);

/// Every whole number below it is exact in an f64.
const EXACT: f64 = (1u64 << 53) as f64;

/// Fields that say nothing about the answer.
const HARMLESS: [&str; 6] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"];

/// What is left to read of a body.
pub(crate) struct Fields(Map<String, Value>);

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = Fault;

    async fn from_request(request: Request, state: &S) -> Result<Fields, Fault> {
        let place = request.extensions().get::<Arc<Place>>().cloned();
        let bytes = tokio::time::timeout(BODY_TIME, Bytes::from_request(request, state)).await;
        let bytes = bytes
            .map_err(|_| Fault::new(StatusCode::REQUEST_TIMEOUT, "the body took too long to arrive"))?
            .map_err(|error| Fault::new(error.status(), error.body_text()))?;
        if let Some(place) = place {
            place.arrived();
        }
        if bytes.len() <= SMALL_BODY {
            return Fields::parse(&bytes);
        }
        // A large one takes seconds and many times its size: a few at a time, beside those who talk to clients.
        let _turn = LARGE_BODIES.acquire().await;
        let parsed = tokio::task::spawn_blocking(move || Fields::parse(&bytes)).await;
        parsed.unwrap_or_else(|_| Err(Fault::new(StatusCode::BAD_REQUEST, "the body cannot be read")))
    }
}

impl Fields {
    /// Of a body that was written here.
    pub(crate) fn of(fields: Map<String, Value>) -> Fields {
        Fields(fields)
    }

    /// All that is left.
    pub(crate) fn rest(self) -> Map<String, Value> {
        self.0
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Fields, Fault> {
        match json::parse(bytes) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(Fault::new(StatusCode::BAD_REQUEST, "the body is no JSON object")),
            Err(error) => Err(Fault::new(StatusCode::BAD_REQUEST, format!("the body is no JSON: {error}"))),
        }
    }

    /// Takes a field; `null` is as good as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, Fault> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number as f32)),
            None => {
                Err(Fault::field(name, format!("must be a number from {} to {}", range.start(), range.end())))
            }
        }
    }

    pub(crate) fn whole(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Fault> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // 1.0 is whole too.
        let rounded = || value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < EXACT);
        let whole = value.as_i64().or_else(|| rounded().map(|number| number as i64));
        match whole.filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(Fault::field(
                name,
                format!("must be a whole number from {} to {}", range.start(), range.end()),
            )),
        }
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, Fault> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(Fault::field(name, "must be true or false")),
        }
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Fault> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(Fault::field(name, "must be a string")),
        }
    }

    /// Refuses a feature that is not there, unless it is switched off.
    pub(crate) fn refuse(&mut self, name: &str, is_off: impl Fn(&Value) -> bool) -> Result<(), Fault> {
        match self.take(name) {
            Some(value) if !is_off(&value) => Err(Fault::field(name, "is not supported by this server")),
            _ => Ok(()),
        }
    }

    /// Everything has been read.
    pub(crate) fn finish(self) -> Result<(), Fault> {
        match self.0.keys().find(|key| !HARMLESS.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => {
                let shown: String = key.chars().take(100).collect();
                Err(Fault::field(shown, "is not known to this endpoint"))
            }
        }
    }
}
