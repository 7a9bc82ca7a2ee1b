//! The world as one word: `{host: [slots]}` as URL-safe base64 of JSON, for a node launcher's command line.
//!
//! The JSON is written with `", "` and `": "` and ASCII escapes, byte for byte what DeepSpeed's launcher writes,
//! so that either side can read the other's.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;

use crate::error::LaunchError;
use crate::filter::ActiveSlots;
use crate::hostfile::{MAX_SLOTS_PER_HOST, check_host_name};

const MAX_ENCODED_BYTES: usize = 64 << 20;

/// Encodes a world.
pub fn encode(world: &ActiveSlots) -> String {
    let mut json = String::from("{");
    for (index, (host, slots)) in world.iter().enumerate() {
        if index > 0 {
            json.push_str(", ");
        }
        push_ascii_string(&mut json, host);
        let slots = slots.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        json.push_str(&format!(": [{slots}]"));
    }
    json.push('}');
    URL_SAFE.encode(json)
}

/// Decodes a world.
pub fn decode(text: &str) -> Result<ActiveSlots, LaunchError> {
    let refuse = |reason: String| LaunchError::WorldInfo { reason };
    if text == "None" {
        return Err(refuse("--world_info was not given a world".to_owned()));
    }
    if text.len() > MAX_ENCODED_BYTES {
        return Err(refuse(format!("{} bytes are more than any world needs", text.len())));
    }
    let json = URL_SAFE.decode(text).map_err(|error| refuse(format!("not URL-safe base64: {error}")))?;
    let world: ActiveSlots = serde_json::from_slice(&json)
        .map_err(|error| refuse(format!("not a JSON map of slot lists: {error}")))?;
    for (host, slots) in &world {
        check_host_name(host).map_err(|reason| refuse(format!("host {host:?}: {reason}")))?;
        if slots.len() > MAX_SLOTS_PER_HOST as usize {
            return Err(refuse(format!("host {host:?} has {} slots", slots.len())));
        }
    }
    Ok(world)
}

fn push_ascii_string(json: &mut String, text: &str) {
    json.push('"');
    for unit in text.encode_utf16() {
        match u8::try_from(unit) {
            Ok(byte @ (b'"' | b'\\')) => json.extend(['\\', char::from(byte)]),
            Ok(byte @ 0x20..=0x7e) => json.push(char::from(byte)),
            _ => json.push_str(&format!("\\u{unit:04x}")),
        }
    }
    json.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded_again() {
        let world: ActiveSlots =
            [("hôte-𝄞".replace('𝄞', "x"), vec![0, 3]), ("b".to_owned(), vec![])].into_iter().collect();
        assert_eq!(decode(&encode(&world)).unwrap(), world);
    }

    #[test]
    fn hostile_worlds_are_refused() {
        let encode = |json: &str| URL_SAFE.encode(json);
        for text in ["", "None", "%%%", &encode("[]"), &encode("{\"a\": [-1]}"), &encode("{\"-o\": [1]}")] {
            assert!(decode(text).is_err(), "{text:?}");
        }
    }
}
