//! What a server says no to, and to whom a token is shown.

use ferrospeed_hub::{Network, Wanted};

use super::server::HubServer;
use super::{bring, hub, with_model};

#[test]
fn a_token_is_sent_to_the_server_and_not_to_the_host_that_has_the_bytes() {
    let ((server, _), place) = (with_model(), tempfile::tempdir().unwrap());
    server.wants_token("hf_secret", 401, "");
    bring(&hub(&server, place.path(), Some("hf_secret"), Network::Online), "org/model", &Wanted::Model)
        .unwrap();
    let asked = server.asked();
    assert!(asked.iter().any(|asked| asked.of_bytes) && asked.iter().any(|asked| !asked.of_bytes));
    for asked in asked {
        assert_eq!(asked.token.as_deref(), (!asked.of_bytes).then_some("hf_secret"), "{asked:?}");
    }
}

#[test]
fn a_refusal_says_what_to_do() {
    let ((server, _), place) = (with_model(), tempfile::tempdir().unwrap());
    let said = |token: Option<&str>, name: &str| {
        bring(&hub(&server, place.path(), token, Network::Online), name, &Wanted::Model)
            .unwrap_err()
            .to_string()
    };
    let text = said(None, "org/nothing");
    assert!(
        text.contains(
            "org/nothing: is neither a folder here nor a name that the server knows: look at the spelling"
        ),
        "{text}"
    );
    server.wants_token("hf_secret", 401, "");
    let text = said(None, "org/model");
    assert!(text.contains("or it is private") && text.contains("set HF_TOKEN"), "{text}");
    server.wants_token("hf_secret", 403, "GatedRepo");
    let text = said(Some("hf_other"), "org/model");
    assert!(text.contains("terms to be accepted") && text.contains("the token of HF_TOKEN"), "{text}");
    assert!(!text.contains("hf_other"), "{text}");
}

#[test]
fn a_list_that_leads_out_of_the_cache_is_refused() {
    let (server, place) = (HubServer::start(), tempfile::tempdir().unwrap());
    server.put("models/org/bad", "config.json", "{}").put("models/org/bad", "../../../evil.json", "x");
    let text = bring(&hub(&server, place.path(), None, Network::Online), "org/bad", &Wanted::Model);
    let text = text.unwrap_err().to_string();
    assert!(text.contains("outside of the repository: '../../../evil.json'"), "{text}");
}
