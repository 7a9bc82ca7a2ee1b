//! What Hugging Face's variables say: where the cache is, which server is asked, and as whom.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{HubError, Result};

/// Whether a server may be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// It may.
    Online,
    /// What is not in the cache is not to be had.
    Offline,
}

/// Where things are, and what may be done.
#[derive(Debug, Clone)]
pub struct HubOptions {
    /// The server, without a slash at its end.
    pub endpoint: String,
    /// The folder of the cache.
    pub cache: PathBuf,
    /// Who asks, for what not everybody may read.
    pub token: Option<String>,
    /// Whether a server may be asked.
    pub network: Network,
    /// Certificates of authorities, in place of those that browsers trust.
    pub authorities: Option<PathBuf>,
    /// How long it waits before it asks a server again that did not answer; then twice as long, and so on.
    pub retry_after: Duration,
    /// How long a server may send nothing new; a process that has a file, and does not go on with it, has ten times as long.
    pub patience: Duration,
}

/// A token is a line.
const MAX_TOKEN_BYTES: u64 = 4096;

impl HubOptions {
    /// As the variables say.
    pub fn from_environment() -> Result<HubOptions> {
        let given = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let folder = |name: &str| given(name).map(PathBuf::from);
        let home = folder("HF_HOME")
            .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("huggingface")))
            .or_else(|| Some(folder("HOME")?.join(".cache/huggingface")));
        let cache = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub"))).ok_or_else(|| HubError::Setting {
            why: "no folder for the Hub's cache: neither HF_HUB_CACHE nor HF_HOME nor HOME is set".into(),
        })?;
        let endpoint = given("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let endpoint = endpoint.trim().trim_end_matches('/').to_owned();
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            return Err(HubError::Setting {
                why: format!("HF_ENDPOINT: '{endpoint}' is no address; give one as https://huggingface.co"),
            });
        }
        let token_file = folder("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        let token = given("HF_TOKEN").or_else(|| given("HUGGING_FACE_HUB_TOKEN"));
        let token = token.or_else(|| ferrospeed_files::read_text(token_file?, MAX_TOKEN_BYTES).ok());
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(HubError::Setting { why: "HF_TOKEN: holds something that no token has".into() });
        }
        let is_on = |name: &str| given(name).is_some_and(|value| is_true(&value));
        let network = match ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().any(is_on) {
            true => Network::Offline,
            false => Network::Online,
        };
        let authorities = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
        let authorities = authorities.into_iter().find_map(folder);
        let (retry_after, patience) = (Duration::from_secs(1), Duration::from_secs(60));
        Ok(HubOptions { endpoint, cache, token, network, authorities, retry_after, patience })
    }
}

/// As Hugging Face reads its switches.
fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.trim().to_ascii_lowercase().as_str())
}
