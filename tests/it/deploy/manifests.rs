//! The container image, the compose file and the manifests of Kubernetes: by the tools that read them where these need no
//! engine, and by what they must say. The worker runs for real, with the environment that the compose file gives it.

use std::{collections::BTreeMap, path::Path, process::Command, time::Duration};

use serde_json::Value;

use super::{shipped, shipped_text, tool, yaml};
use crate::bed::{
    origin::Origin,
    postgres::Postgres,
    process::run_to_end,
    recipe::{Recipe, Site},
    replica::{Replica, paceline, run_paceline},
    worker::python_environment,
};

const PASSWORD: &str = "not-a-secret";

/// The compose file as `docker-compose config` understands it.
fn compose() -> Value {
    let mut command = Command::new("docker-compose");
    command
        .arg("-f")
        .arg(shipped("compose.yaml"))
        .arg("config")
        .env("POSTGRES_PASSWORD", PASSWORD)
        .env("GRAFANA_PASSWORD", PASSWORD);
    let outcome = tool(command);
    assert!(outcome.status.success(), "{}", outcome.stderr);
    let site = Site::new();
    let path = site.write("compose.yaml", &outcome.text());
    let mut documents = yaml(&path.to_string_lossy());
    documents.remove(0)
}

#[test]
fn the_compose_file_is_valid_and_leaves_its_worker_no_other_way_out() {
    let compose = compose();
    let services = &compose["services"];
    let replicas = ["paceline-1", "paceline-2", "paceline-3"];
    for name in replicas {
        let replica = &services[name];
        assert_eq!(replica["hostname"], name);
        assert_eq!(replica["read_only"], true);
        assert_eq!(replica["cap_drop"][0], "ALL");
        assert_eq!(replica["healthcheck"]["test"][1], "/usr/local/bin/paceline");
        let url = replica["environment"]["PACELINE_STORE_URL"].as_str();
        assert!(url.expect("a store").contains(PASSWORD));
        let target = format!("{name}:9128");
        assert!(shipped_text("prometheus/prometheus.yml").contains(&target));
        let server = format!("server {name}:3128 ");
        assert!(shipped_text("nginx/nginx.conf").contains(&server));
    }
    let worker = services["worker"]["networks"]
        .as_object()
        .expect("networks");
    assert_eq!(worker.keys().collect::<Vec<_>>(), ["workers"]);
    assert_eq!(compose["networks"]["workers"]["internal"], true);
    let nginx = &services["nginx"]["networks"]["inside"]["ipv4_address"];
    let believed = format!("proxy_protocol_from = [{nginx}]");
    assert!(
        shipped_text("paceline.toml").contains(&believed),
        "{believed}"
    );
    // A password that is missing must be an error, not an empty one.
    let mut without = Command::new("docker-compose");
    without.arg("-f").arg(shipped("compose.yaml")).arg("config");
    without.env_remove("POSTGRES_PASSWORD");
    assert!(!tool(without).status.success());
}

#[test]
fn the_example_worker_needs_nothing_but_its_environment() {
    let compose = compose();
    let worker = &compose["services"]["worker"];
    let environment = worker["environment"].as_object().expect("variables");
    let (origin, site) = (Origin::tls(&["lh3.googleusercontent.com"]), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "40.0")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let config = site.path().join("r0.toml");
    let bundle = site.path().join("trust.pem").to_string_lossy().into_owned();
    let made = run_paceline(
        site.path(),
        &[
            "ca",
            "bundle",
            "--config",
            &config.to_string_lossy(),
            "--output",
            &bundle,
        ],
    );
    assert_eq!(made.text(), format!("wrote {bundle}\n"), "{}", made.stderr);

    let script = &worker["command"][1];
    assert_eq!(script, "/worker.py");
    let mut command = Command::new("/usr/bin/python3");
    command.arg(shipped("worker/worker.py")).env_clear();
    for (name, value) in environment {
        let value = value.as_str().expect("text");
        // What the names of the compose network stand for.
        let value = value
            .replace("nginx:3128", &replica.proxy().to_string())
            .replace("/trust/bundle.pem", &bundle);
        command.env(name, value);
    }
    let outcome = run_to_end(command, Duration::from_secs(60));
    let rounds = environment["ROUNDS"].as_str().and_then(|r| r.parse().ok());
    let said = format!("{}{}", outcome.text(), outcome.stderr);
    assert!(outcome.status.success(), "{said}");
    assert_eq!(Some(origin.arrivals().len()), rounds, "{said}");
    assert_eq!(
        outcome
            .text()
            .lines()
            .filter(|l| l.starts_with("200 "))
            .count(),
        rounds.unwrap()
    );
    let slots = ["mode=\"embedded\""];
    assert_eq!(
        replica.scrape().sum("paceline_dispatches_total", &slots),
        rounds.map(|r| r as f64)
    );
}

/// Runs the image's program as a container would: in the image's folder, with its configuration unless `environment`
/// names another, and with `/var/lib` and `/trust` in `site`.
fn in_image(site: &Site, arguments: &Value, environment: &[(&str, &str)]) -> String {
    let lib = site.path().join("lib");
    let inside = |text: &str| {
        let text = text.replace("/var/lib", &lib.to_string_lossy());
        text.replace("/trust/", &format!("{}/", site.path().display()))
    };
    let config = site.write("image.toml", &inside(&shipped_text("paceline.toml")));
    let arguments = arguments.as_array().expect("a list").iter();
    let arguments: Vec<_> = arguments
        .map(|a| inside(a.as_str().expect("text")))
        .collect();
    let mut command = paceline(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    command
        .env("PACELINE_CONFIG", config)
        .envs(environment.iter().copied())
        .current_dir(lib.join("paceline"));
    let outcome = tool(command);
    let said = format!("{}{}", outcome.text(), outcome.stderr);
    assert!(outcome.status.success(), "{arguments:?}: {said}");
    said
}

#[test]
fn containers_make_the_ca_and_the_bundle_from_what_the_files_give_them() {
    let (compose, site) = (compose(), Site::new());
    for folder in ["lib/paceline/certs", "lib/paceline-trust"] {
        std::fs::create_dir_all(site.path().join(folder)).expect("our own folder");
    }
    let run = |name: &str| {
        let service = &compose["services"][name];
        let variables = service["environment"].as_object().expect("variables");
        let variables: Vec<_> = variables
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str().expect("text")))
            .collect();
        in_image(&site, &service["command"], &variables)
    };
    run("ca");
    run("trust");
    let bundle = site.path().join("lib/paceline-trust/bundle.pem");
    let bundle = std::fs::read_to_string(bundle).expect("the bundle");
    let certs = site.path().join("lib/paceline/certs");
    let root = std::fs::read_to_string(certs.join("ca.pem")).expect("the root");
    assert!(
        bundle.contains(root.trim_end()),
        "the bundle has the root in it"
    );

    // The init container of a worker has the root and nothing else.
    std::fs::remove_dir_all(&certs).expect("our own folder");
    std::fs::create_dir(&certs).expect("our own folder");
    std::fs::write(certs.join("ca.pem"), &root).expect("our own folder");
    let manifest = yaml("kubernetes/worker.yaml").pop().expect("the worker");
    let init = manifest
        .pointer("/spec/template/spec/initContainers/0")
        .expect("one");
    assert_eq!(init["env"][0]["name"], "PACELINE_CONFIG");
    in_image(&site, &init["args"], &[("PACELINE_CONFIG", "")]);
    let same = std::fs::read_to_string(site.path().join("bundle.pem"));
    assert_eq!(same.expect("the bundle"), bundle);
}

/// `check` with a store that is there; what it finds wrong.
fn check(site: &Site, store: &str, config: &Path) -> String {
    let mut command = paceline(&["check", "--config", &config.to_string_lossy()]);
    command
        .env("PACELINE_STORE_URL", store)
        .current_dir(site.path());
    let outcome = tool(command);
    match outcome.status.code() {
        Some(0) => String::new(),
        _ => format!("{}{}", outcome.text(), outcome.stderr),
    }
}

#[test]
fn the_shipped_configurations_are_accepted() {
    let (postgres, site) = (Postgres::start(), Site::new());
    assert_eq!(check(&site, &postgres.url(), &shipped("paceline.toml")), "");
    let map = yaml("kubernetes/configmap.yaml");
    let text = map[0]["data"]["paceline.toml"].as_str().expect("a file");
    assert_eq!(
        check(&site, &postgres.url(), &site.write("map.toml", text)),
        ""
    );
}

#[test]
fn the_manifests_have_the_form_that_kubernetes_wants() {
    let files = std::fs::read_dir(shipped("kubernetes")).expect("the folder");
    let files = files.map(|f| f.expect("a file").path());
    let mut command = Command::new(python_environment());
    command.args(["-m", "kubernetes_validate", "--strict", "--quiet"]);
    command.args(["-k", "1.31"]);
    // Kinds that are not Kubernetes' own.
    command.args(
        files.filter(|f| !f.ends_with("servicemonitor.yaml") && !f.ends_with("kustomization.yaml")),
    );
    let outcome = tool(command);
    let said = format!("{}{}", outcome.text(), outcome.stderr);
    assert!(outcome.status.success() && said.is_empty(), "{said}");
}

#[test]
fn the_manifests_fit_together() {
    let listed = yaml("kubernetes/kustomization.yaml").remove(0);
    let listed = listed["resources"].as_array().expect("a list").clone();
    let listed: Vec<_> = listed.iter().filter_map(Value::as_str).collect();
    let there = std::fs::read_dir(shipped("kubernetes")).expect("the folder");
    assert_eq!(there.count(), listed.len() + 1, "each file is listed");
    let mut all = BTreeMap::new();
    for file in listed {
        for document in yaml(&format!("kubernetes/{file}")) {
            let text = |pointer| document.pointer(pointer).and_then(Value::as_str);
            let named = (
                text("/kind"),
                text("/metadata/namespace"),
                text("/metadata/name"),
            );
            let named = [named.0, named.1, named.2].map(|t| t.unwrap_or("-").to_owned());
            all.insert(named.join("/"), document.clone());
        }
    }
    let deployment = &all["Deployment/paceline/paceline"];
    let pod = &deployment["spec"]["template"];
    let at = |pointer: &str| pod.pointer(pointer).unwrap_or_else(|| panic!("{pointer}"));
    let labels = &pod["metadata"]["labels"];
    for selector in [
        &deployment["spec"]["selector"]["matchLabels"],
        &all["PodDisruptionBudget/paceline/paceline"]["spec"]["selector"]["matchLabels"],
        &all["Service/paceline/paceline"]["spec"]["selector"],
        &all["Service/paceline/paceline-admin"]["spec"]["selector"],
        &all["NetworkPolicy/paceline/paceline"]["spec"]["podSelector"]["matchLabels"],
    ] {
        assert_eq!(selector, labels);
    }
    assert_eq!(
        at("/spec/containers/0/readinessProbe/httpGet/path"),
        "/readyz"
    );
    assert_eq!(
        at("/spec/containers/0/livenessProbe/httpGet/path"),
        "/healthz"
    );
    assert_eq!(
        at("/spec/containers/0/securityContext/readOnlyRootFilesystem"),
        true
    );
    assert_eq!(at("/spec/securityContext/runAsNonRoot"), true);
    // Leaving the Service, the drain (35 s by default), and the end fit into what the kubelet waits.
    let grace = at("/spec/terminationGracePeriodSeconds").as_u64();
    let sleep = at("/spec/containers/0/lifecycle/preStop/sleep/seconds").as_u64();
    assert!(grace >= sleep.map(|s| s + 35 + 10), "{grace:?}");
    let config = all["ConfigMap/paceline/paceline"]["data"]["paceline.toml"].as_str();
    let config: toml::Table = config.expect("a file").parse().expect("TOML");
    let numbers = config["store"]["max_replicas"].as_integer();
    assert!(numbers > deployment["spec"]["replicas"].as_i64());

    // The worker: its label is what the policy selects, and the policy leads to paceline and the resolver alone.
    let policy = &all["NetworkPolicy/workers/no-way-out-but-paceline"]["spec"];
    let worker = &all["Deployment/workers/worker"]["spec"]["template"];
    for (label, value) in policy["podSelector"]["matchLabels"]
        .as_object()
        .expect("labels")
    {
        assert_eq!(&worker["metadata"]["labels"][label], value);
    }
    assert_eq!(policy["policyTypes"], serde_json::json!(["Egress"]));
    let ways = policy["egress"].as_array().expect("rules");
    assert_eq!(ways.len(), 2);
    assert_eq!(&ways[0]["to"][0]["podSelector"]["matchLabels"], labels);
    assert!(
        ways.iter()
            .all(|way| way["to"].is_array() && way["ports"].is_array())
    );
    let environment = all["ConfigMap/workers/paceline-environment"]["data"].as_object();
    for (name, value) in environment.expect("variables") {
        if name.to_lowercase().ends_with("ps_proxy") || name.to_lowercase() == "http_proxy" {
            assert_eq!(value, "http://paceline.paceline.svc:3128");
        }
    }
}

#[test]
fn the_image_has_no_shell_no_root_and_no_key_and_its_build_sees_all_it_needs() {
    let file = shipped_text("Dockerfile");
    let stages: Vec<_> = file.lines().filter(|l| l.starts_with("FROM ")).collect();
    assert_eq!(stages.len(), 2);
    assert!(stages[1].contains("distroless") && stages[1].ends_with(":nonroot"));
    let last = file.split("\nFROM ").last().expect("a stage");
    assert!(
        !last.lines().any(|l| l.starts_with("RUN ")),
        "there is no shell to run it"
    );
    assert!(last.contains("\nUSER 65532:65532\n"));
    for form in ["HEALTHCHECK ", "ENTRYPOINT ", "CMD "] {
        let line = last.lines().find(|l| l.starts_with(form)).expect(form);
        assert!(line.contains("[\""), "{line} would need a shell");
    }
    // What the build context lets through makes a package that cargo accepts, without one more file.
    let context = Site::new();
    let ignore = shipped_text("Dockerfile.dockerignore");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert!(ignore.lines().any(|l| l == "*"));
    for kept in ignore.lines().filter_map(|l| l.strip_prefix('!')) {
        let target = context.path().join(kept);
        std::fs::create_dir_all(target.parent().expect("a folder")).expect("our own folder");
        let mut copy = Command::new("cp");
        copy.arg("-r").arg(root.join(kept)).arg(target);
        assert!(tool(copy).status.success(), "{kept} is not there");
    }
    assert!(!context.path().join("certs").exists());
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--locked", "--offline"])
        .current_dir(context.path());
    let outcome = tool(tree);
    assert!(outcome.status.success(), "{}", outcome.stderr);
    // The base image has the C library and little more.
    let mut ldd = Command::new("ldd");
    ldd.arg(super::program());
    for line in tool(ldd).text().lines() {
        let known = [
            "linux-vdso",
            "libgcc_s",
            "libm.",
            "libc.",
            "ld-linux",
            "libpthread",
            "libdl",
            "librt",
        ];
        assert!(known.iter().any(|k| line.contains(k)), "{line}");
    }
}
