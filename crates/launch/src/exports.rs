//! Which variables travel to other hosts, and the file that adds more.
//!
//! Variables travel by prefix (`NCCL`, `PYTHON`, `UCX`, …) and by name (those of Azure's Nebula), then come
//! the lines of `.deepspeed_env` (another name by `DS_ENV_FILE`) in the home folder and in the current one:
//! `KEY=VALUE`, comments and blank lines allowed, a later line wins.

use indexmap::IndexMap;

use crate::error::{LaunchError, shorten};

/// An environment in the order in which it was given.
pub type Environment = IndexMap<String, String>;

/// The default name of the environment file.
pub const ENV_FILE_NAME: &str = ".deepspeed_env";

/// The variable that gives the environment file another name.
pub const ENV_FILE_VARIABLE: &str = "DS_ENV_FILE";

const PREFIXES: [&str; 6] = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", OWN_PREFIX];

/// How ranks talk (`FERROSPEED_COMM_BACKEND`, `FERROSPEED_COMM_ENCRYPT`): the same on every host.
const OWN_PREFIX: &str = "FERROSPEED_COMM_";

const NEBULA_NAMES: [&str; 18] = [
    "DLTS_JOB_ID",
    "DLTS_NUM_WORKER",
    "NEBULA_PERSISTENT_STORAGE_PATH",
    "NEBULA_PERSISTENT_TIME_INTERVAL",
    "AML_RUN_ID",
    "AZUREML_RUN_TOKEN",
    "AZUREML_WORKSPACE_SCOPE",
    "AZUREML_EXPERIMENT_SCOPE",
    "AZUREML_RUN_HISTORY_SERVICE_ENDPOINT",
    "AZUREML_RUN_ID",
    "NEBULA_MEMORY_BUFFER_SIZE",
    "AZUREML_PARAMETER_ITPJOB_NAME",
    "FC_TASKROLE_NAME",
    "FC_TASK_INDEX",
    "MASTER_HOST",
    "LOCAL_HOST",
    "AZUREML_BLOB_ACCOUNT_NAME",
    "AZUREML_BLOB_ACCOUNT_KEY",
];

/// Device choices that AISC makes for each node itself.
const WITHHELD_ON_AISC: [&str; 2] = ["NCCL_IB_HCA", "UCX_NET_DEVICES"];

/// Picks the variables of `environment` that travel, in its order.
pub fn travelling(environment: &Environment) -> Environment {
    let on_aisc = environment.contains_key("AISC_JOB_NAME");
    let travels = |name: &str| {
        let listed = PREFIXES.iter().chain(&NEBULA_NAMES).any(|prefix| name.starts_with(prefix));
        // A name that no shell can assign (bash's exported functions have such names) cannot be exported.
        listed && is_variable_name(name) && !(on_aisc && WITHHELD_ON_AISC.contains(&name))
    };
    let picked = environment.iter().filter(|(name, _)| travels(name));
    picked.map(|(name, value)| (name.clone(), value.trim().to_owned())).collect()
}

/// Parses an environment file and adds its variables to `exports`.
pub fn add_env_file(exports: &mut Environment, path: &str, text: &str) -> Result<(), LaunchError> {
    for (index, raw) in text.lines().enumerate() {
        let line = raw.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let parsed = line.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
        let Some((key, value)) = parsed.filter(|(key, _)| is_variable_name(key)) else {
            return Err(LaunchError::EnvFile { path: path.to_owned(), line: index + 1, text: shorten(line) });
        };
        exports.insert(key.to_owned(), value.to_owned());
    }
    Ok(())
}

fn is_variable_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_env_file_may_have_comments_and_blank_lines_and_later_lines_win() {
        let mut exports = Environment::new();
        add_env_file(&mut exports, "f", "# why\n\n A = 1 \nB=x=y\nA=2\n").unwrap();
        let expected: Environment = [("A", "2"), ("B", "x=y")].map(|(k, v)| (k.into(), v.into())).into();
        assert_eq!(exports, expected);
    }

    #[test]
    fn a_bad_line_is_named_with_file_and_number() {
        let error =
            add_env_file(&mut Environment::new(), "/home/u/.deepspeed_env", "A=1\nNOEQUALS\n").unwrap_err();
        assert_eq!(
            error.to_string(),
            "/home/u/.deepspeed_env line 2: \"NOEQUALS\" is not `KEY=VALUE`, a comment or empty"
        );
        assert!(add_env_file(&mut Environment::new(), "f", "A; rm -rf /=1").is_err());
    }

    #[test]
    fn how_ranks_talk_is_the_same_on_every_host() {
        let environment: Environment =
            [("FERROSPEED_COMM_ENCRYPT", "1"), ("FERROSPEED_JOB_TOKEN", "secret"), ("HOME", "/")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into();
        assert_eq!(travelling(&environment).keys().collect::<Vec<_>>(), ["FERROSPEED_COMM_ENCRYPT"]);
    }

    #[test]
    fn an_exported_shell_function_does_not_travel() {
        let environment: Environment = [("UCX_f%%".to_owned(), "() { :; }".to_owned())].into();
        assert!(travelling(&environment).is_empty());
    }
}
