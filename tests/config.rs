//! Configuration: operators' parameters from files, the environment and the program.

#![cfg(feature = "config")]

use std::{collections::BTreeMap, path::PathBuf};

use common::*;
use serde::{Deserialize, Serialize, Serializer};
use tempfile::TempDir;
use wakeline::{Config, prelude::*};

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct UpperParams {
    rate: u32,
    gain: f32,
    #[serde(default)]
    name: String,
    window: Option<Window>,
    #[serde(default)]
    mode: Mode,
    #[serde(default)]
    steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Window {
    size: u8,
    #[serde(default)]
    tags: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Step {
    by: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    #[default]
    Quiet,
    Loud,
}

const APP: &str = r#"
[upper]
rate = 3
gain = 1.5
name = "shout"
mode = "loud"

[upper.window]
size = 16
tags = ["a", "b"]

[lower]
rate = 1
"#;

fn file(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("app.toml");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

/// The error of reading `[upper]` from a file with that text.
fn wrong(text: &str) -> String {
    let (_folder, path) = file(text);
    let error = Config::file(path).unwrap().get::<UpperParams>("upper").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    error.to_string()
}

/// Runs a test's body in a process with these variables, since a test must not change its own environment.
fn with_variables(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os("CONFIG_CHILD").is_some() {
        return body();
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("config::{test}"), "--nocapture"])
        .env("CONFIG_CHILD", "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    assert!(String::from_utf8_lossy(&child.stdout).contains("1 passed"), "no test has that name");
}

#[test]
fn config_gives_each_operator_its_section() {
    let (_folder, path) = file(APP);
    let config = Config::file(path).unwrap();
    let upper: UpperParams = config.get("upper").unwrap();
    let window = Some(Window { size: 16, tags: vec!["a".into(), "b".into()] });
    let expected = UpperParams { rate: 3, gain: 1.5, name: "shout".into(), window, mode: Mode::Loud, steps: vec![] };
    assert_eq!(upper, expected);
    // A single value, a part of a section, a whole section as a map.
    assert_eq!(config.get::<u64>("lower.rate").unwrap(), 1);
    assert_eq!(config.get::<Window>("upper.window").unwrap().size, 16);
    assert_eq!(config.get::<BTreeMap<String, u8>>("lower").unwrap()["rate"], 1);

    // A date is read as a string.
    let (_folder, path) = file("since = 2024-02-29\n[times]\nall = [07:30:00, 08:00:00]\n");
    let config = Config::file(path).unwrap();
    assert_eq!(config.get::<String>("since").unwrap(), "2024-02-29");
    assert_eq!(config.get::<Vec<String>>("times.all").unwrap(), ["07:30:00", "08:00:00"]);
}

#[test]
fn config_later_layers_take_precedence() {
    let variables = [
        ("WAKELINE_TEST_UPPER__RATE", "4"),
        ("WAKELINE_TEST_UPPER__GAIN", "2"),
        ("WAKELINE_TEST_UPPER__NAME", "'7'"),
        ("WAKELINE_TEST_UPPER__MODE", "quiet"),
        ("WAKELINE_TEST_UPPER__WINDOW__TAGS", "['x', \"y z\"]"),
        ("WAKELINE_TEST_UPPER__STEPS", "[{ by = 1 }, { by = -2 }]"),
        ("WAKELINE_TESTING_UPPER__RATE", "99"),
    ];
    with_variables("config_later_layers_take_precedence", &variables, || {
        let (_folder, path) = file(APP);
        let (_other, on_top) = file("[upper]\nrate = 5\ngain = 5\n");
        let config = Config::file(&path).unwrap().with_file(on_top).unwrap();
        let config = config.env("WAKELINE_TEST").unwrap().set("upper.rate", 6_u8).unwrap();
        let window = Some(Window { size: 16, tags: vec!["x".into(), "y z".into()] });
        let steps = vec![Step { by: 1 }, Step { by: -2 }];
        let expected = UpperParams { rate: 6, gain: 2.0, name: "7".into(), window, mode: Mode::Quiet, steps };
        assert_eq!(config.get::<UpperParams>("upper").unwrap(), expected);
        assert_eq!(config.get::<u8>("lower.rate").unwrap(), 1, "values that no later layer sets are kept");

        // Another order changes the precedence.
        let config = Config::new().set("upper.rate", 6).unwrap().env("WAKELINE_TEST").unwrap();
        assert_eq!(config.get::<u8>("upper.rate").unwrap(), 4);
    });
}

#[test]
fn config_a_wrong_type_is_reported_with_file_line_and_key() {
    let text = wrong("[upper]\ngain = 1.0\nrate = \"fast\"\n");
    assert!(
        text.contains("`upper.rate` in ") && text.contains("app.toml:3 is string \"fast\", but u32 is expected"),
        "{text}"
    );
    // Values are not converted.
    assert!(wrong("[upper]\nrate = 2.5\ngain = 1\n").contains("is float `2.5`, but u32 is expected"));
    assert!(wrong("[upper]\nrate = -1\ngain = 1\n").contains("-1`, but u32 is expected"));
    assert!(wrong("[upper]\nrate = true\ngain = 1\n").contains("is bool true, but u32 is expected"));
    let text = wrong("[upper]\nrate = 1\ngain = 1\n\n[upper.window]\nsize = 256\n");
    assert!(text.contains("`upper.window.size` in ") && text.contains("app.toml:6 is "), "{text}");
    let text = wrong("[upper]\nrate = 1\ngain = 1\nwindow = { size = 1, tags = ['a', 5] }\n");
    assert!(text.contains("`upper.window.tags.1` in ") && text.contains("app.toml:4 is "), "{text}");
    let text = wrong("[upper]\nrate = 1\ngain = 1\nmode = 'medium'\n");
    assert!(text.contains("app.toml:4 is `medium`, but one of `quiet`, `loud` is expected"), "{text}");
    let text = wrong("upper = 5\n");
    assert!(text.contains("`upper` in ") && text.contains("app.toml:1 is "), "{text}");
}

#[test]
fn config_an_unknown_field_is_reported_with_the_known_ones() {
    let text = wrong("[upper]\nrate = 1\ngain = 1\nvolume = 2\n");
    let expected =
        "app.toml:4 is not a parameter: the parameters are `rate`, `gain`, `name`, `window`, `mode`, `steps`";
    assert!(text.contains("`upper.volume` in ") && text.contains(expected), "{text}");
    // In an optional part, and in an element of a list.
    let text = wrong("[upper]\nrate = 1\ngain = 1\nwindow = { size = 1, sise = 2 }\n");
    assert!(text.contains("`upper.window.sise` in ") && text.contains("the parameters are `size`, `tags`"), "{text}");
    let text = wrong("[upper]\nrate = 1\ngain = 1\nsteps = [{ by = 1 }, { by = 2, buy = 3 }]\n");
    assert!(text.contains("`upper.steps.1.buy` in ") && text.contains("the parameters are `by`"), "{text}");

    /// A type that denies unknown fields itself.
    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Strict {
        #[allow(dead_code)]
        rate: u8,
    }

    let config = Config::new().set("strict.rate", 1).unwrap().set("strict.rat", 1).unwrap();
    let text = config.get::<Strict>("strict").unwrap_err().to_string();
    assert!(text.contains("`strict.rat` in the program, tests/config.rs:"), "{text}");
    assert!(text.ends_with("the parameters are `rate`"), "{text}");
    let text = config.get::<BTreeMap<String, Strict>>("").unwrap_err().to_string();
    assert!(text.contains("`strict.rat` in "), "{text}");
}

#[test]
fn config_a_missing_field_is_reported_with_the_ways_to_set_it() {
    let (_folder, path) = file("[upper]\ngain = 1\n");
    let config = Config::file(&path).unwrap().env("WAKELINE_TEST").unwrap();
    let text = config.get::<UpperParams>("upper").unwrap_err().to_string();
    let expected = format!(
        "`upper.rate` is missing: set it in {}, or by the variable `WAKELINE_TEST_UPPER__RATE`",
        path.display()
    );
    assert!(text.ends_with(&expected), "{text}");
    for key in ["lower.rate", "lower"] {
        let text = config.get::<u32>(key).unwrap_err().to_string();
        assert!(text.contains(&format!("`{key}` is missing")), "{text}");
    }
    let text = Config::new().get::<u32>("rate").unwrap_err().to_string();
    assert!(text.ends_with("`rate` is missing: set it by `Config::set`"), "{text}");
}

/// A misspelt name is two problems: an unknown parameter and a missing one.
#[test]
fn config_all_problems_are_reported_at_once() {
    let text = wrong("[upper]\nrat = 1\ngian = 1\nwindow = { size = 1, sise = 2 }\n");
    for what in ["`upper.rat`", "`upper.gian`", "`upper.window.sise`", "`upper.rate` is missing"] {
        assert!(text.contains(what), "missing: {what}\nin: {text}");
    }
    assert!(text.contains("4 problems"), "{text}");
}

#[test]
fn config_a_missing_section_is_an_empty_one() {
    #[derive(Debug, PartialEq, Deserialize)]
    struct Easy {
        #[serde(default)]
        level: u32,
    }

    let config = Config::new();
    assert_eq!(config.get::<Easy>("easy").unwrap(), Easy { level: 0 });
    assert_eq!(config.get::<Option<Easy>>("easy").unwrap(), None);
    assert_eq!(config.get::<Option<u32>>("easy.level").unwrap(), None);
    assert!(config.get::<BTreeMap<String, u32>>("easy").unwrap().is_empty());
}

#[test]
fn config_a_wrong_variable_is_named() {
    let variables = [
        ("WAKELINE_TEST_UPPER__RATE", "fast"),
        ("WAKELINE_TEST_LOWER__NAME", "7"),
        ("WAKELINE_TEST_LOWER__LEVEL", "2"),
        ("WAKELINE_TEST_DATE", "2024-02-29"),
    ];
    with_variables("config_a_wrong_variable_is_named", &variables, || {
        let (_folder, path) = file("[upper]\nrate = 1\ngain = 1\n[lower]\nrate = 1\ngain = 1\n");
        let config = Config::file(path).unwrap().env("WAKELINE_TEST").unwrap();
        let text = config.get::<UpperParams>("upper").unwrap_err().to_string();
        let expected =
            "`upper.rate` in the variable `WAKELINE_TEST_UPPER__RATE` is string \"fast\", but u32 is expected";
        assert!(text.ends_with(expected), "{text}");
        let text = config.get::<UpperParams>("lower").unwrap_err().to_string();
        assert!(
            text.contains("`WAKELINE_TEST_LOWER__NAME` is ") && text.contains("a string is expected: put it in quotes"),
            "{text}"
        );
        assert!(
            text.contains("`lower.level` in the variable `WAKELINE_TEST_LOWER__LEVEL` is not a parameter"),
            "{text}"
        );
        assert_eq!(config.get::<String>("date").unwrap(), "2024-02-29");
    });
}

#[test]
fn config_unused_keys_are_found() {
    let (_folder, path) =
        file("debug = true\n[upper]\nrate = 3\ngain = 1\n[uper]\nrate = 4\n[deep.a]\nx = 1\n[deep.b]\ny = 2\n");
    let config = Config::file(&path).unwrap().set("lower.rate", 1).unwrap();
    assert_eq!(config.unused(), ["debug", "deep", "lower", "uper", "upper"]);
    config.get::<UpperParams>("upper").unwrap();
    config.get::<BTreeMap<String, u32>>("deep.a").unwrap();
    assert_eq!(config.unused(), ["debug", "deep.b", "lower", "uper"]);
    let error = config.deny_unused().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let text = error.to_string();
    let at = path.display();
    for what in
        [&format!("`debug` in {at}:1 and "), &format!("`uper` in {at}:5"), "`lower` in the program, tests/config.rs:"]
    {
        assert!(text.contains(what), "missing: {what}\nin: {text}");
    }
    for key in ["debug", "uper.rate", "lower"] {
        let _ = config.get::<serde::de::IgnoredAny>(key);
    }
    config.get::<u32>("deep.b.y").unwrap();
    config.deny_unused().unwrap();

    /// The whole file as one type.
    #[derive(Deserialize)]
    #[allow(dead_code)]
    struct App {
        debug: bool,
        upper: UpperParams,
        uper: BTreeMap<String, u32>,
        deep: BTreeMap<String, BTreeMap<String, u32>>,
    }

    let config = Config::file(&path).unwrap();
    config.get::<App>("").unwrap();
    config.deny_unused().unwrap();
}

#[test]
fn config_a_file_that_cannot_be_read_is_an_error() {
    let error = Config::file("no/such/app.toml").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert_eq!(error.downcast_ref::<std::io::Error>().unwrap().kind(), std::io::ErrorKind::NotFound);
    assert!(error.to_string().contains("no/such/app.toml"), "{error}");

    let (_folder, path) = file("[upper]\nrate = \n");
    let error = Config::file(&path).unwrap_err();
    assert!(error.to_string().contains("app.toml"), "{error}");
    let error = format!("{error:#}");
    assert!(error.contains("app.toml could not be read: ") && error.contains("line 2"), "{error}");
}

#[test]
fn config_an_invalid_key_or_value_is_an_error() {
    for key in ["", "upper.", "upper..rate", ".rate"] {
        let error = Config::new().set(key, 1).unwrap_err();
        assert!(
            error.to_string().contains("tests/config.rs:") && error.to_string().contains("is not a valid key"),
            "{error}"
        );
    }
    for key in ["upper.", "upper..rate", ".rate", "."] {
        let error = Config::new().set("upper.rate", 1).unwrap().get::<Option<u32>>(key).unwrap_err();
        assert!(error.to_string().contains(&format!("`{key}` is not a valid key")), "{error}");
    }
    let error = Config::new().set("upper", BTreeMap::from([((1, 2), 3)])).unwrap_err();
    assert!(error.to_string().contains("sets `upper` to a value that a TOML file cannot express"), "{error}");
    // A whole section can be set at once.
    let config = Config::new().set("upper", BTreeMap::from([("rate", 1.0), ("gain", 2.0)])).unwrap();
    assert_eq!(config.get::<f32>("upper.gain").unwrap(), 2.0);
}

/// A value that claims the given number of parts and has none.
struct Claims(usize, fn(usize) -> Shape);

enum Shape {
    List(usize),
    Map(usize),
    Tuple(usize),
    Struct(usize),
    Variant(usize),
}

impl serde::Serialize for Claims {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        use serde::ser::*;

        match (self.1)(self.0) {
            Shape::List(len) => serializer.serialize_seq(Some(len))?.end(),
            Shape::Map(len) => serializer.serialize_map(Some(len))?.end(),
            Shape::Tuple(len) => serializer.serialize_tuple(len)?.end(),
            Shape::Struct(len) => serializer.serialize_struct("claims", len)?.end(),
            Shape::Variant(len) => serializer.serialize_tuple_variant("claims", 0, "variant", len)?.end(),
        }
    }
}

#[test]
fn config_a_value_that_claims_many_parts_gets_no_memory_for_them() {
    for shape in [Shape::List, Shape::Map, Shape::Tuple, Shape::Struct, Shape::Variant] {
        for len in [1 << 40, usize::MAX] {
            assert!(Config::new().set("upper", Claims(len, shape)).is_ok());
        }
    }
}

/// Values may be secret, so `Debug` does not show them.
#[test]
fn config_is_shown_without_its_values() {
    let shown = format!("{:?}", Config::new().set("api.secret", "hunter2").unwrap());
    assert!(shown.contains("tests/config.rs") && !shown.contains("hunter2"), "{shown}");
}

/// Passes parameters from a file to a running operator.
#[tokio::test]
async fn config_operators_run_with_the_files_parameters() {
    #[derive(Deserialize)]
    struct Count {
        from: u32,
        to: u32,
    }

    impl Operator for Count {
        type Ports = SourcePorts<u32>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            if self.from == self.to {
                cx.finish();
            }
            self.from += 1;
            ports.output.send(self.from - 1).await?;
            Ok(())
        }
    }

    let (_folder, path) = file("[count]\nfrom = 3\nto = 7\n");
    let config = Config::file(path).unwrap().set("count.to", 5).unwrap();
    let seen = shared();
    let noted = seen.clone();
    let mut flow = Flow::new("configured");
    let count = flow.add("count", config.get::<Count>("count").unwrap());
    let keep = flow.add(
        "keep",
        sink(move |n: u32| {
            lock(&noted).push(n);
            std::future::ready(Ok(()))
        }),
    );
    flow.connect(count.output, keep.input);
    config.deny_unused().unwrap();
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [3, 4, 5]);
}

/// A value with the given number of levels.
fn nested(levels: usize) -> serde_json::Value {
    (1..levels).fold(serde_json::json!(1), |inner, _| serde_json::json!([inner]))
}

#[derive(Clone, Copy)]
enum Deep {
    List,
    Map,
    Some,
    Newtype,
    Variant,
}

/// A number, nested by the given number of levels.
struct Level(Deep, usize);

impl Serialize for Level {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(left) = self.1.checked_sub(1) else { return serializer.serialize_u32(1) };
        let next = Level(self.0, left);
        match self.0 {
            Deep::List => serializer.collect_seq([next]),
            Deep::Map => serializer.collect_map([("a", next)]),
            Deep::Some => serializer.serialize_some(&next),
            Deep::Newtype => serializer.serialize_newtype_struct("Level", &next),
            Deep::Variant => serializer.serialize_newtype_variant("Level", 0, "Next", &next),
        }
    }
}

/// Each key and each value has fewer levels than the parser refuses, but together they have more than a stack holds.
#[test]
fn config_a_file_of_any_depth_is_read_or_refused() {
    fn read_all() {
        let part = "a.".repeat(70);
        let tables = (0..70).fold("1".to_string(), |inner, _| format!("{{ {part}b = {inner} }}"));
        for (text, line) in [
            (format!("x = 1\n[{part}b]\n{part}c = {tables}\n"), 2),
            (format!("x = 1\n\n{part}b = 1\n"), 3),
            (format!("x = {}1{}\n", "[".repeat(70), "]".repeat(70)), 1),
        ] {
            let (_folder, path) = file(&text);
            let error = Config::file(&path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Setup);
            let (error, place) = (error.to_string(), format!("app.toml:{line}: "));
            assert!(error.contains(&place) && error.contains("more than 64 levels deep"), "{error}");
            // Invalid TOML is reported before the depth.
            let (_folder, path) = file(&format!("{text}y = \n"));
            let error = format!("{:#}", Config::file(&path).unwrap_err());
            assert!(error.contains("TOML parse error"), "{error}");
        }
        // The greatest depth that is allowed.
        let key = format!("{}b", "a.".repeat(63));
        let (_folder, path) = file(&format!("{key} = 1\n"));
        let config = Config::file(&path).unwrap();
        assert_eq!(config.unused(), ["a"]);
        assert_eq!(config.get::<u32>(&key).unwrap(), 1);
        for (key, levels) in [("a", 64), ("a.b", 63), (&*key, 1)] {
            assert!(Config::new().set(key, nested(levels)).is_ok());
            let error = Config::new().set(key, nested(levels + 1)).unwrap_err().to_string();
            assert!(error.contains("tests/config.rs:") && error.contains("more than 64 levels deep"), "{error}");
        }
        // A serializer recurses for each level, and so do these values.
        for kind in [Deep::List, Deep::Map, Deep::Some, Deep::Newtype, Deep::Variant] {
            let error = Config::new().set("a", Level(kind, 100_000)).unwrap_err().to_string();
            assert!(error.contains("more than 64 levels deep"), "{error}");
        }
        let wrapped = Config::new().set("a", Level(Deep::Newtype, 100)).unwrap();
        assert_eq!(wrapped.get::<u32>("a").unwrap(), 1);
    }
    common::alone::in_a_process("config::config_a_file_of_any_depth_is_read_or_refused", || {
        std::thread::Builder::new().stack_size(2 << 20).spawn(read_all).unwrap().join().unwrap();
    });
}

#[test]
fn config_a_variable_of_any_depth_is_read_or_refused() {
    let part = "a.".repeat(70);
    let deep = (0..70).fold("1".to_string(), |inner, _| format!("{{ {part}b = {inner} }}"));
    // In addition to the two parts of the key.
    let [most, more] = [62, 63].map(|levels| format!("{}1{}", "[".repeat(levels), "]".repeat(levels)));
    let variables = [("TOO_A__B", &*deep), ("ONE_MORE_A__B", &*more), ("DEEPEST_A__B", &*most)];
    with_variables("config_a_variable_of_any_depth_is_read_or_refused", &variables, || {
        let read = || {
            for prefix in ["TOO", "ONE_MORE"] {
                let error = Config::new().env(prefix).unwrap_err().to_string();
                assert!(error.contains(&format!("the variable `{prefix}_A__B` sets `a.b`: ")), "{error}");
                assert!(error.contains("more than 64 levels deep"), "{error}");
            }
            assert_eq!(Config::new().env("DEEPEST").unwrap().unused(), ["a"]);
        };
        std::thread::Builder::new().stack_size(2 << 20).spawn(read).unwrap().join().unwrap();
    });
}

#[test]
fn config_a_name_with_a_dot_is_no_key() {
    let (_folder, path) = file("\"upper.rate\" = 3\n\n[upper]\nrate = 4\n[models]\n\"a.onnx\" = true\n");
    let config = Config::file(&path).unwrap();
    assert_eq!(config.get::<u32>("upper.rate").unwrap(), 4);
    let error = config.get::<String>("upper.rate").unwrap_err().to_string();
    assert!(error.contains("app.toml:4"), "{error}");
    assert_eq!(config.unused(), ["models", "\"upper.rate\""]);
    let models = config.get::<BTreeMap<String, bool>>("models").unwrap();
    assert_eq!(models, BTreeMap::from([("a.onnx".to_string(), true)]));
    let error = config.get::<BTreeMap<String, u32>>("models").unwrap_err().to_string();
    assert!(error.contains("`models.\"a.onnx\"` in ") && error.contains("app.toml:6"), "{error}");
    let error = config.deny_unused().unwrap_err().to_string();
    assert!(error.contains("`\"upper.rate\"` in ") && error.contains("app.toml:1"), "{error}");
}

/// The time to read a file is linear in its length. If it were quadratic, this would take minutes.
#[test]
fn config_a_long_file_is_read_in_time_and_its_lines_are_right() {
    let keys = 40_000;
    let mut text: String = (0..keys).map(|n| format!("key{n} = {n}\n")).collect();
    text.push_str("[table]\r\n\r\nlast = true\r\n");
    let (_folder, path) = file(&text);
    let config = Config::file(&path).unwrap();
    for n in 0..keys {
        assert_eq!(config.get::<usize>(&format!("key{n}")).unwrap(), n);
    }
    assert_eq!(config.unused(), ["table"]);
    for (key, line) in [("key0", 1), ("key39999", keys), ("table.last", keys + 3)] {
        let error = config.get::<Vec<String>>(key).unwrap_err().to_string();
        assert!(error.contains(&format!(":{line}")), "{key}: {error}");
    }
}

#[test]
fn config_a_variable_with_one_underscore_too_few_is_recognised() {
    let variables = [("WAKELINE_TEST_UPPER_RATE", "4"), ("WAKELINE_TEST_OTHER", "4")];
    with_variables("config_a_variable_with_one_underscore_too_few_is_recognised", &variables, || {
        #[derive(Debug, Deserialize)]
        struct Rate {
            #[allow(dead_code, reason = "read only")]
            rate: u32,
        }
        let config = Config::new().env("WAKELINE_TEST").unwrap();
        let error = config.get::<Rate>("upper").unwrap_err().to_string();
        let wanted = "`upper.rate` is missing: set it by the variable `WAKELINE_TEST_UPPER__RATE` \
                      (`WAKELINE_TEST_UPPER_RATE` is another key: two underscores separate names)";
        assert!(error.ends_with(wanted), "{error}");
        let error = config.deny_unused().unwrap_err().to_string();
        assert!(error.contains("(did you mean `WAKELINE_TEST_UPPER__RATE`?)"), "{error}");
        assert!(error.contains("`other` in the variable `WAKELINE_TEST_OTHER` and `upper_rate`"), "{error}");
    });
}
